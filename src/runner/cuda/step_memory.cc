#include "runner/cuda/step_memory.h"

#include "device/cuda/blocking_copy.h"

namespace tessera {
namespace {

int64_t words_of_rows(const StepSizes& sizes) {
    return 8 * int64_t{sizes.rows} + 3;
}

}  // namespace

int64_t StepInputs::words(const StepSizes& sizes) {
    return words_of_rows(sizes) + int64_t{sizes.rows} * sizes.pages + sizes.tokens;
}

StepInputs::StepInputs(int32_t* base, const StepSizes& sizes) : row_words(words_of_rows(sizes)) {
    const auto take = [&base](int64_t count) {
        int32_t* place = base;
        base += count;
        return place;
    };
    slots = take(sizes.rows);
    positions = take(sizes.rows);
    first_tokens = take(sizes.rows + 1);
    table_lengths = take(sizes.rows);
    first_new_pages = take(sizes.rows + 1);
    prefill_first_rows = take(sizes.rows + 1);
    logit_rows = take(sizes.rows);
    sample_slots = take(sizes.rows);
    new_pages = take(int64_t{sizes.rows} * sizes.pages);
    prefill_tokens = take(sizes.tokens);
}

Result<StepStaging> StepStaging::allocate(const StepSizes& sizes) {
    StepStaging out;
    const auto pinned = [](PinnedBuffer& buffer, std::string_view name, int64_t bytes) -> Status {
        Result<PinnedBuffer> made = PinnedBuffer::allocate(name, bytes);
        if (made.ok()) {
            buffer = made.take();
        }
        return made.status();
    };
    const int64_t rows = sizes.rows;
    Status status = pinned(out.input_memory, "step inputs", 4 * StepInputs::words(sizes));
    if (status.ok()) {
        status =
            pinned(out.result_memory, "step results", rows * static_cast<int64_t>(sizeof(SampleRowResult)));
    }
    const int64_t slot_bytes = rows * static_cast<int64_t>(sizeof(SampleSlot));
    if (status.ok()) {
        status = pinned(out.init_memory, "new slots",
                        slot_bytes + rows * (2 * kSampleBiasMax + kSampleForcedMax) * 4);
    }
    if (status.ok()) {
        status = pinned(out.history_memory, "histories of new slots", 4 * history_words(sizes));
    }
    if (!status.ok()) {
        return status;
    }
    out.history = out.history_memory.as<int32_t>();
    out.inputs = StepInputs(out.input_memory.as<int32_t>(), sizes);
    out.results = out.result_memory.as<SampleRowResult>();
    out.slots = out.init_memory.as<SampleSlot>();
    out.bias_ids = reinterpret_cast<int32_t*>(out.init_memory.data() + slot_bytes);
    out.bias_values = reinterpret_cast<float*>(out.bias_ids + rows * kSampleBiasMax);
    out.forced = reinterpret_cast<int32_t*>(out.bias_values + rows * kSampleBiasMax);
    return out;
}

Result<StepMemory> StepMemory::allocate(const StepSizes& sizes, MemoryBudget& budget) {
    StepMemory out;
    Status status = sample_cuda_prepare(sizes.vocab);
    const auto take = [&](auto*& pointer, std::string_view name, int64_t count) {
        using T = std::remove_reference_t<decltype(*pointer)>;
        if (!status.ok()) {
            return;
        }
        const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
        Result<DeviceBuffer> buffer = DeviceBuffer::allocate(budget, MemoryCategory::kWorkspace, name, bytes);
        if (!buffer.ok()) {
            status = buffer.status();
            return;
        }
        pointer = buffer->template as<T>();
        fill_blocking(pointer, 0, bytes);
        out.buffers.push_back(buffer.take());
    };
    const int64_t rows = sizes.rows;
    take(out.samples.slot, "slots", rows);
    take(out.samples.prompt_seen, "slots", rows * ((sizes.vocab + 63) / 64));
    take(out.samples.output_seen, "slots", rows * ((sizes.vocab + 63) / 64));
    take(out.samples.output_often, "slots", rows * ((sizes.vocab + 63) / 64));
    take(out.samples.output_counts, "slots", rows * sizes.vocab);
    take(out.samples.last_token, "slots", rows);
    take(out.sample_exchange, "sampler", sample_cuda_exchange_bytes(sizes.vocab, rows));
    take(out.bias_ids, "slots", rows * kSampleBiasMax);
    take(out.bias_values, "slots", rows * kSampleBiasMax);
    take(out.forced, "slots", rows * kSampleForcedMax);
    take(out.slot_tables, "page tables", rows * sizes.pages);
    take(out.history, "slots", history_words(sizes));
    int32_t* words = nullptr;
    take(words, "step inputs", StepInputs::words(sizes));
    take(out.tokens, "step inputs", sizes.tokens);
    take(out.token_positions, "step inputs", sizes.tokens);
    take(out.token_rows, "step inputs", sizes.tokens);
    take(out.row_tables, "page tables", rows * sizes.pages);
    take(out.results, "step results", rows);
    if (!status.ok()) {
        return status;
    }
    out.inputs = StepInputs(words, sizes);
    out.samples.bias_ids = out.bias_ids;
    out.samples.bias_values = out.bias_values;
    out.samples.forced = out.forced;
    return out;
}

}  // namespace tessera
