#include "weights/config/quant_config.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>

#include "weights/checkpoint/name_map.h"
#include "weights/config/field_reader.h"

namespace tessera {
namespace {

constexpr std::array<std::string_view, 7> kQuantisedSuffixes = {
    ".q_proj", ".k_proj", ".v_proj", ".o_proj", ".gate_proj", ".up_proj", ".down_proj"};

void check_method(FieldReader& fields) {
    const std::string method = fields.text({"quant_method"});
    if (fields.status().ok() && method != "fp8") {
        fields.fail_value("quant_method", json::Value(method), "\"fp8\" (no other method is known)");
    }
    const std::string scheme = fields.text({"activation_scheme"});
    if (fields.status().ok() && scheme == "dynamic") {
        fields.fail(
            unimplemented(fmt::format("{}: activation_scheme is \"dynamic\", which is not implemented; use a "
                                      "checkpoint with static input scales",
                                      fields.file())));
    } else if (fields.status().ok() && scheme != "static") {
        fields.fail_value("activation_scheme", json::Value(scheme), "\"static\"");
    }
    if (const json::Value* block = fields.find("weight_block_size")) {
        fields.fail_value("weight_block_size", *block,
                          "absent (weights are scaled per tensor, not per block)");
    }
    const json::Value* format = fields.find("fmt");
    if (format != nullptr && !(format->is_string() && format->as_string() == "e4m3")) {
        fields.fail_value("fmt", *format, "\"e4m3\"");
    }
}

void read_kv_scheme(FieldReader& fields, QuantConfig& quant) {
    const json::Value* scheme = fields.find("kv_cache_scheme");
    if (scheme == nullptr) {
        return;
    }
    quant.static_kv_scales = scheme->is_string() && scheme->as_string() == "static";
    if (!quant.static_kv_scales) {
        fields.fail_value("kv_cache_scheme", *scheme, "\"static\" or absent");
    }
}

void read_ignored(FieldReader& fields, QuantConfig& quant) {
    for (const char* key : {"ignored_layers", "modules_to_not_convert"}) {
        const json::Value* list = fields.find(key);
        if (list == nullptr) {
            continue;
        }
        const bool strings = list->is_array() && std::ranges::all_of(list->items(), &json::Value::is_string);
        if (!strings) {
            fields.fail_value(key, *list, "a list of module names");
            return;
        }
        for (const json::Value& name : list->items()) {
            quant.ignored_layers.push_back(canonical_name(name.as_string()));
        }
    }
    std::ranges::sort(quant.ignored_layers);
}

}  // namespace

bool QuantConfig::quantises(std::string_view module) const {
    if (!fp8) {
        return false;
    }
    const bool known = std::ranges::any_of(kQuantisedSuffixes,
                                           [&](std::string_view suffix) { return module.ends_with(suffix); });
    return known && !std::ranges::binary_search(ignored_layers, module, std::less<>());
}

Result<QuantConfig> parse_quant_config(const json::Value& config, const std::string& file) {
    QuantConfig quant;
    const json::Value* section = config.find("quantization_config");
    if (section == nullptr || section->is_null()) {
        return quant;
    }
    const std::string where = file + ": quantization_config";
    if (!section->is_object()) {
        return invalid_argument(
            fmt::format("{} is of type {}; it must be an object", where, json::type_name(section->type())));
    }
    FieldReader fields(*section, where);
    quant.fp8 = true;
    check_method(fields);
    read_kv_scheme(fields, quant);
    read_ignored(fields, quant);
    if (!fields.status().ok()) {
        return fields.status();
    }
    return quant;
}

}  // namespace tessera
