#include "ops/attention/cuda/attention_cuda.h"

#include <cmath>
#include <cstdio>
#include <gtest/gtest.h>
#include <limits>
#include <random>
#include <vector>

#include "device/cuda/stream.h"
#include "ops/attention/cuda/attention_cuda_testing.h"

namespace tessera {
namespace {

using attention_testing::Case;
using attention_testing::Sequence;
using attention_testing::Shape;

void expect_near(const std::vector<float>& lse, const std::vector<double>& want, double tolerance) {
    ASSERT_EQ(lse.size(), want.size());
    for (size_t i = 0; i < lse.size(); ++i) {
        if (std::isinf(want[i])) {
            ASSERT_EQ(lse[i], -std::numeric_limits<float>::infinity()) << i;
        } else {
            ASSERT_NEAR(lse[i], want[i], tolerance) << i;
        }
    }
}

TEST(AttentionCuda, decode_agrees_with_loops_in_double) {
    for (const bool fp8 : {false, true}) {
        for (const int32_t q_len : {1, 2, 3, 4}) {
            for (const int32_t first_slot : {0, 1}) {
                std::vector<Sequence> sequences;
                for (const int32_t position : {0, 1, 15, -1, 62, 63, 64, 127, 300, 511, 512, 1500}) {
                    sequences.push_back({position, q_len});
                }
                const Case test_case({{16, 2}, fp8, first_slot, sequences});
                const double error = relative_error(test_case.decode(4096), test_case.reference());
                std::printf("decode %s q_len %d first_slot %d: relative error %.2e\n", fp8 ? "fp8" : "bf16",
                            q_len, first_slot, error);
                EXPECT_LT(error, 5e-3);
            }
        }
    }
}

TEST(AttentionCuda, decode_takes_every_group_size_and_gives_the_logarithm_of_the_sum) {
    const std::vector<AttentionCudaShape> shapes = {{2, 2},  {4, 2},  {8, 2}, {8, 1},
                                                    {24, 2}, {32, 2}, {64, 8}};
    for (const AttentionCudaShape heads : shapes) {
        for (const bool fp8 : {false, true}) {
            for (const int32_t q_len : {1, 2, 3, 4}) {
                std::vector<Sequence> sequences;
                for (const int32_t position : {0, -1, 70, 129, 1000}) {
                    sequences.push_back({position, q_len});
                }
                const Case test_case({heads, fp8, 1, sequences});
                std::vector<float> lse;
                std::vector<double> want_lse;
                const std::vector<double> want = test_case.reference(&want_lse);
                EXPECT_LT(relative_error(test_case.decode(2048, &lse), want), 5e-3)
                    << heads.q_heads << "/" << heads.kv_heads << " fp8 " << fp8 << " q_len " << q_len;
                expect_near(lse, want_lse, 0.02);
            }
        }
    }
}

// With scales of K and V for a tensor, for each token and head, and none; of sequences of one piece, of a few
// and of hundreds.
TEST(AttentionCuda, decode_gives_the_logarithm_of_the_sum_over_many_blocks) {
    struct Form {
        bool fp8, scaled;
    };
    for (const AttentionCudaShape heads : {AttentionCudaShape{8, 1}, {24, 2}}) {
        for (const auto& [fp8, scaled] : {Form{false, false}, {true, false}, {true, true}}) {
            for (const int32_t q_len : {1, 2}) {
                std::vector<Sequence> sequences(20, {30, q_len});
                sequences[1] = {20000, q_len};
                sequences[5] = {-1, q_len};
                sequences[9] = {3000, q_len};
                sequences[14] = {900, q_len};
                const Case test_case(
                    {.heads = heads, .fp8 = fp8, .first_slot = 1, .sequences = sequences, .scaled = scaled});
                std::vector<float> lse;
                std::vector<double> want_lse;
                const std::vector<double> want = test_case.reference(&want_lse);
                EXPECT_LT(relative_error(test_case.decode(32768, &lse), want), 5e-3)
                    << heads.q_heads << " heads, fp8 " << fp8 << " scaled " << scaled << " q_len " << q_len;
                expect_near(lse, want_lse, 5e-3);
            }
        }
    }
}

TEST(AttentionCuda, takes_any_number_of_query_heads_for_a_kv_head_up_to_16) {
    for (const int32_t group : {3, 5, 6, 7, 9, 10, 11, 13, 14, 15}) {
        for (const bool fp8 : {false, true}) {
            for (const int32_t q_len : {1, 2}) {
                const Case test_case(
                    {{group, 1}, fp8, 0, {{0, q_len}, {-1, q_len}, {70, q_len}, {700, q_len}}});
                EXPECT_LT(relative_error(test_case.decode(2048), test_case.reference()), 5e-3)
                    << "decode, group " << group << " fp8 " << fp8 << " q_len " << q_len;
            }
            const Case test_case({{group, 1}, fp8, 1, {{0, 33}, {-1, 1}, {129, 20}, {200, 1}}});
            EXPECT_LT(relative_error(test_case.prefill(), test_case.reference()), fp8 ? 4e-2 : 3e-3)
                << "prefill, group " << group << " fp8 " << fp8;
        }
    }
}

TEST(AttentionCudaDeathTest, says_which_rows_decode_cannot_divide) {
    const auto bytes = [](int32_t group, int32_t q_len) {
        return decode_cuda_workspace_bytes(
            {.shape = {group, 1}, .batch = 1, .q_len = q_len, .slots_max = 64, .sm_count = 132});
    };
    EXPECT_GT(bytes(16, 4), 0);
    EXPECT_GT(bytes(13, 4), 0);
    EXPECT_DEATH(bytes(13, 3), "cannot be halved");
    EXPECT_DEATH(bytes(17, 1), "1 to 16 query heads");
    EXPECT_DEATH(bytes(8, 5), "1 to 4 queries");
}

TEST(AttentionCuda, decode_of_many_and_of_long_sequences) {
    std::vector<std::vector<Sequence>> batches(1);
    for (int i = 0; i < 512; ++i) {
        batches[0].push_back({i % 7 == 3 ? -1 : i * 37 % 190, 1});
    }
    for (const int32_t q_len : {1, 2, 4}) {
        std::vector<Sequence> mixed(40, {30, q_len});
        mixed[3] = {20000, q_len};  // many pieces, some more than a dozen, few
        mixed[20] = {3000, q_len};
        mixed[33] = {900, q_len};
        batches.push_back(mixed);
    }
    for (const bool fp8 : {false, true}) {
        for (const std::vector<Sequence>& sequences : batches) {
            const Case test_case({{8, 1}, fp8, 0, sequences});
            const double error = relative_error(test_case.decode(32768), test_case.reference());
            std::printf("decode %zu sequences %s q_len %d: relative error %.2e\n", sequences.size(),
                        fp8 ? "fp8" : "bf16", sequences[0].q_len, error);
            EXPECT_LT(error, 5e-3);
        }
    }
}

TEST(AttentionCuda, decode_scales_keys_for_each_token_and_head_and_values_for_each_head) {
    for (const AttentionCudaShape heads : {AttentionCudaShape{8, 1}, {16, 2}, {64, 8}}) {
        for (const int32_t q_len : {1, 2, 4}) {
            std::vector<Sequence> sequences;
            for (const int32_t position : {0, 15, -1, 63, 64, 300, 1500}) {
                sequences.push_back({position, q_len});
            }
            const Case test_case({.heads = heads,
                                  .fp8 = true,
                                  .first_slot = q_len % 2,
                                  .sequences = sequences,
                                  .scaled = true});
            std::vector<float> lse;
            std::vector<double> want_lse;
            const std::vector<double> want = test_case.reference(&want_lse);
            const double error = relative_error(test_case.decode(4096, &lse), want);
            std::printf("decode %d/%d q_len %d with scales: relative error %.2e\n", heads.q_heads,
                        heads.kv_heads, q_len, error);
            EXPECT_LT(error, 5e-3);
            expect_near(lse, want_lse, 5e-3);
        }
    }
}

TEST(AttentionCuda, decode_of_random_batches) {
    std::mt19937 random(11);
    const auto below = [&](int32_t n) { return static_cast<int32_t>(random() % static_cast<uint32_t>(n)); };
    for (const AttentionCudaShape heads : {AttentionCudaShape{8, 1}, {8, 2}}) {
        for (const int32_t batch : {1, 2, 3, 9, 70, 512}) {
            const int32_t q_len = 1 + below(4);
            std::vector<Sequence> sequences;
            for (int32_t b = 0; b < batch; ++b) {
                const int32_t longest = below(6) == 0 && batch < 10 ? 5000 : 130;
                sequences.push_back({below(6) == 0 ? -1 : below(longest), q_len});
            }
            const bool fp8 = below(2) == 0;
            const Case test_case({heads, fp8, below(2), sequences});
            EXPECT_LT(relative_error(test_case.decode(16384), test_case.reference()), 5e-3)
                << batch << " sequences, " << heads.q_heads << "/" << heads.kv_heads << ", q_len " << q_len
                << ", fp8 " << fp8;
        }
    }
}

TEST(AttentionCuda, the_device_deals_as_the_model_does) {
    std::mt19937 random(3);
    for (const int32_t batch : {1, 2, 17, 64, 256, 1000}) {
        const int32_t longest = batch % 2 == 0 ? 65536 : 700;
        std::vector<int32_t> positions, tiles;
        for (int32_t b = 0; b < batch; ++b) {
            positions.push_back(b % 9 == 8 ? -1 : static_cast<int32_t>(random() % longest));
            tiles.push_back(decode_tiles(decode_slots(positions.back(), 2, 1, 65536)));
        }
        DeviceArena arena;
        Stream stream;
        DecodePlanCudaArgs plan{.shape = {32, 4},
                                .positions = arena.upload(positions),
                                .batch = batch,
                                .q_len = 2,
                                .first_slot = 1,
                                .slots_max = 65536,
                                .sm_count = device_sm_count()};
        plan.workspace = arena.poisoned<std::byte>(decode_cuda_workspace_bytes(plan));
        decode_plan_cuda(stream.get(), plan);
        stream.synchronize();
        const int32_t bins = decode_cuda_bins(plan);
        const std::vector<DecodeBin> want = plan_decode({bins, tiles});
        const std::vector<DecodeBin> got =
            DeviceArena::download(reinterpret_cast<DecodeBin*>(plan.workspace), bins + 1);
        for (size_t i = 0; i < want.size(); ++i) {
            ASSERT_EQ(got[i].sequence, want[i].sequence) << batch << " " << i;
            ASSERT_EQ(got[i].tile, want[i].tile) << batch << " " << i;
            ASSERT_EQ(got[i].pieces, want[i].pieces) << batch << " " << i;
            ASSERT_EQ(got[i].piece, want[i].piece) << batch << " " << i;
        }
    }
}

TEST(AttentionCuda, prefill_agrees_with_loops_in_double) {
    for (const bool fp8 : {false, true}) {
        for (const int32_t first_slot : {0, 1}) {
            for (const AttentionCudaShape heads :
                 {AttentionCudaShape{16, 2}, AttentionCudaShape{4, 1}, AttentionCudaShape{12, 1}}) {
                const Case test_case(
                    {heads,
                     fp8,
                     first_slot,
                     {{0, 1}, {0, 63}, {0, 65}, {129, 127}, {-1, 1}, {64, 24}, {700, 25}, {63, 2}}});
                const std::vector<float> got = test_case.prefill();
                const double error = relative_error(got, test_case.reference());
                std::printf("prefill %s heads %d/%d first_slot %d: relative error %.2e\n",
                            fp8 ? "fp8" : "bf16", heads.q_heads, heads.kv_heads, first_slot, error);
                // e4m3 has three bits of fraction; q and the weights of the softmax become e4m3.
                EXPECT_LT(error, fp8 ? 4e-2 : 3e-3);
                EXPECT_EQ(got, test_case.prefill(true)) << "by lists of all KV tiles";
            }
        }
    }
}

TEST(AttentionCuda, prefill_takes_every_group_size_and_many_sequences) {
    std::vector<Sequence> sequences;
    for (const int32_t q_len : {1, 2, 7, 8, 9, 15, 16, 17, 33, 64, 65, 128, 129, 200}) {
        sequences.push_back({q_len % 5 == 4 ? -1 : q_len * 37 % 300, q_len});
    }
    for (const AttentionCudaShape heads :
         {AttentionCudaShape{2, 2}, {4, 2}, {8, 2}, {24, 2}, {32, 2}, {32, 4}, {64, 8}}) {
        for (const bool fp8 : {false, true}) {
            const Case test_case({heads, fp8, 1, sequences});
            const std::vector<float> got = test_case.prefill();
            const double error = relative_error(got, test_case.reference());
            std::printf("prefill %s heads %d/%d, %zu sequences: relative error %.2e\n", fp8 ? "fp8" : "bf16",
                        heads.q_heads, heads.kv_heads, sequences.size(), error);
            EXPECT_LT(error, fp8 ? 4e-2 : 3e-3);
            EXPECT_EQ(got, test_case.prefill(true)) << "by lists of all KV tiles";
        }
    }
}

// Single tokens, empty rows, prompts and chunks of up to `longest` queries.
std::vector<Sequence> mixed_sequences(int32_t count, int32_t longest) {
    std::vector<Sequence> sequences;
    for (int32_t b = 0; b < count; ++b) {
        const Sequence kinds[] = {{b * 37 % 190, 1},
                                  {-1, 1},
                                  {0, 1 + b * 13 % longest},
                                  {b / 5 % 3 * 63, 1},
                                  {b * 29 % 260, 1 + b * 7 % longest}};
        sequences.push_back(kinds[b % 5]);
    }
    return sequences;
}

// A row's bits are those that it has alone, as the deterministic engine's decode rows need.
TEST(AttentionCuda, prefill_of_15_to_1024_sequences_gives_each_what_it_has_alone) {
    std::vector<std::vector<Sequence>> batches = {
        mixed_sequences(15, 40), mixed_sequences(16, 40),  mixed_sequences(33, 40),  mixed_sequences(64, 40),
        mixed_sequences(257, 9), mixed_sequences(512, 12), mixed_sequences(1024, 5), mixed_sequences(512, 1)};
    std::vector<Sequence> pairs;  // long enough for pairs of query tiles
    for (int32_t b = 0; b < 24; ++b) {
        pairs.push_back({b % 6 == 1 ? -1 : b * 53 % 300, b % 6 == 1 ? 1 : 60 + b * 31 % 60});
    }
    batches.push_back(pairs);
    for (const bool fp8 : {false, true}) {
        for (const std::vector<Sequence>& sequences : batches) {
            const size_t count = sequences.size();
            const Case test_case({{8, 1}, fp8, static_cast<int32_t>(count % 2), sequences});
            const std::vector<float> got = test_case.prefill();
            const double error = relative_error(got, test_case.reference());
            std::printf("prefill %s, %zu sequences: relative error %.2e\n", fp8 ? "fp8" : "bf16", count,
                        error);
            EXPECT_LT(error, fp8 ? 4e-2 : 3e-3);
            for (size_t b = 0; b < count; b += count / 7) {
                EXPECT_EQ(test_case.rows_of(got, b), test_case.prefill_alone(b))
                    << count << " sequences, fp8 " << fp8 << ", number " << b;
            }
        }
    }
}

// The sums of e4m3 products keep 13 bits below their largest term. Here each term is 16 (a slot's weight)
// times a power of two, so 2^14 terms are the most that a sum can hold: one sum over these 40,000 slots would
// give 0.41 of what is right (0.82 with 14 bits), while those of 1,024 slots are exact.
TEST(AttentionCuda, prefill_adds_up_equal_terms_without_loss) {
    for (const bool fp8 : {false, true}) {
        for (const Sequence sequence : {Sequence{40000, 2}, Sequence{40000, 40}}) {  // a tile; pairs
            const Case test_case(
                {.heads = {16, 1}, .fp8 = fp8, .first_slot = 0, .sequences = {sequence}, .level = true});
            EXPECT_LT(relative_error(test_case.prefill(), test_case.level_output()), 1e-3)
                << "fp8 " << fp8 << ", queries " << sequence.q_len;
        }
    }
}

// V of one sign: a model of sums that drop all below 13 bits gives 1.4e-2 for sums of 1,024 slots, 6.4e-2 for
// 4,096 and 0.34 for one over all, beside which the rounding of q and of weights averages out.
TEST(AttentionCuda, long_rows_of_positive_values) {
    for (const bool fp8 : {false, true}) {
        const Case test_case({.heads = {8, 1},
                              .fp8 = fp8,
                              .first_slot = 0,
                              .sequences = {{40000, 1}, {5000, 1}},
                              .positive = true});
        const std::vector<double> want = test_case.reference();
        const double prefill = relative_error(test_case.prefill(), want);
        const double decode = relative_error(test_case.decode(65536), want);
        std::printf("positive values, %s: relative error of prefill %.2e, of decode %.2e\n",
                    fp8 ? "fp8" : "bf16", prefill, decode);
        EXPECT_LT(prefill, fp8 ? 4e-2 : 3e-3);
        EXPECT_LT(decode, 5e-3);
    }
}

TEST(AttentionCuda, prefill_after_long_prefixes) {
    for (const bool fp8 : {false, true}) {
        for (const int32_t longest : {65533, 262141}) {
            const Case test_case({{8, 1}, fp8, 0, {{40000, 17}, {5, 2}, {longest, 3}}});
            const double error = relative_error(test_case.prefill(), test_case.reference());
            std::printf("prefill %s after %d: relative error %.2e\n", fp8 ? "fp8" : "bf16", longest, error);
            EXPECT_LT(error, fp8 ? 5e-2 : 3e-3);
        }
    }
}

TEST(AttentionCuda, prefill_sees_the_listed_kv_tiles_alone) {
    for (const bool fp8 : {false, true}) {
        for (const AttentionCudaShape heads : {AttentionCudaShape{16, 2}, AttentionCudaShape{12, 1}}) {
            const Case test_case({.heads = heads,
                                  .fp8 = fp8,
                                  .first_slot = 1,
                                  .sequences = {{0, 300}, {-1, 1}, {700, 60}, {1900, 130}, {1500, 1}},
                                  .partial = true});
            const std::vector<double> want = test_case.reference();
            const double error = relative_error(test_case.prefill(true), want);
            std::printf("prefill %s %d/%d of two thirds of the tiles: relative error %.2e\n",
                        fp8 ? "fp8" : "bf16", heads.q_heads, heads.kv_heads, error);
            EXPECT_LT(error, fp8 ? 4e-2 : 3e-3);
            EXPECT_GT(relative_error(test_case.prefill(), want), 0.1) << "all tiles give something else";
        }
    }
}

TEST(AttentionCuda, prefill_takes_scales_of_k_for_each_token_and_of_v_for_each_head) {
    const std::vector<Sequence> sequences = {{0, 1}, {0, 65}, {129, 127}, {-1, 1}, {700, 25}, {63, 2}};
    for (const bool rising : {false, true}) {
        for (const AttentionCudaShape heads : {AttentionCudaShape{16, 2}, AttentionCudaShape{12, 1}}) {
            const Case test_case({heads, true, 1, sequences, rising, true});
            const std::vector<float> got = test_case.prefill();
            const double error = relative_error(got, test_case.reference());
            std::printf("prefill %d/%d with scales, rising %d: relative error %.2e\n", heads.q_heads,
                        heads.kv_heads, rising, error);
            EXPECT_LT(error, 4e-2);
            EXPECT_EQ(got, test_case.prefill(true)) << "by lists of all KV tiles";
        }
    }
    const Case one({{8, 1}, true, 1, {{200, 300}}, false, true});
    const std::vector<float> whole = one.prefill();
    const std::vector<float> rest = one.prefill(false, 77);
    EXPECT_EQ(rest, std::vector<float>(whole.end() - static_cast<int64_t>(rest.size()), whole.end()));
}

// The last KV tile comes first: what is subtracted from the scores must move at each.
TEST(AttentionCuda, prefill_of_scores_that_rise_from_tile_to_tile) {
    for (const bool fp8 : {false, true}) {
        const Case test_case({{16, 2}, fp8, 1, {{900, 70}, {0, 300}, {500, 3}, {1270, 1}}, true});
        const std::vector<float> got = test_case.prefill();
        const double error = relative_error(got, test_case.reference());
        std::printf("prefill %s of rising scores: relative error %.2e\n", fp8 ? "fp8" : "bf16", error);
        EXPECT_LT(error, fp8 ? 4e-2 : 3e-3);
        EXPECT_EQ(got, test_case.prefill(true)) << "by lists of all KV tiles";
    }
}

// The largest weight is not a power of two, so the product takes it rounded. Added up before it was rounded,
// the weights gave 1.4e-3 and 2.9e-2 here.
TEST(AttentionCuda, prefill_where_one_slot_outweighs_all_others) {
    for (const bool fp8 : {false, true}) {
        const Case test_case({{8, 1}, fp8, 0, {{600, 40}}, false, false, true});
        const double error = relative_error(test_case.prefill(), test_case.reference());
        std::printf("prefill %s of one slot: relative error %.2e\n", fp8 ? "fp8" : "bf16", error);
        EXPECT_LT(error, fp8 ? 1.5e-2 : 3e-4);
    }
}

TEST(AttentionCuda, a_query_is_prefilled_to_the_same_bits_in_any_chunk) {
    for (const AttentionCudaShape heads : {AttentionCudaShape{8, 1}, AttentionCudaShape{12, 1}}) {
        for (const bool fp8 : {false, true}) {
            for (const bool rising : {false, true}) {
                const Case test_case({heads, fp8, 1, {{200, 700}}, rising});
                const std::vector<float> whole = test_case.prefill();
                for (const int32_t skip : {1, 7, 50, 333, 699}) {
                    const std::vector<float> rest = test_case.prefill(false, skip);
                    const std::vector<float> same(whole.end() - static_cast<int64_t>(rest.size()),
                                                  whole.end());
                    EXPECT_EQ(rest, same) << heads.q_heads << " heads, fp8 " << fp8 << " without " << skip;
                }
            }
        }
    }
}

// Whoever ends first, the parts of a split sequence are added in one order.
TEST(AttentionCuda, decode_gives_the_same_bits_in_every_run) {
    for (const bool fp8 : {false, true}) {
        const Case test_case({{8, 1}, fp8, 0, {{20000, 1}, {1500, 1}, {900, 1}}});
        const std::vector<float> first = test_case.decode(32768);
        for (int run = 0; run < 3; ++run) {
            ASSERT_EQ(test_case.decode(32768), first);
        }
    }
}

}  // namespace
}  // namespace tessera
