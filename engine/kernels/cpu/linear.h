// Linear layers over packed rows. See linear.cpp.
#pragma once

#include "tiles.h"

namespace ponder {

enum class Output : int32_t {
  kRows = 0,      // bfloat16 rows
  kAdd = 1,       // added to bfloat16 rows, times `multiplier`
  kFloats = 2,    // float32 rows
  kGatedSilu = 3, // silu(gate) * up as packed rows, where gate and up alternate in blocks of 16 columns
  kGatedGelu = 4,
  kGatedGeluTanh = 5,
};

// A weight (columns out, columns in), with its scales and bias. Mirrored in binding.py.
struct Weight {
  const void* tiles;    // bfloat16 or int8, or the blocks of grouped.cpp
  const float* bias;    // (out,) or null
  const float* scales;  // (out,), filled up to whole blocks where weights are grouped; null for bfloat16
  int64_t out, in;      // `in` is a multiple of 32 (bfloat16, grouped) or 64 (int8 tiles)
  int64_t eight_bits_from;  // with int8 tiles: so many tokens are rounded to 8 bits too, fewer keep 16
  int64_t group;            // columns of a scale, 16 to 128; 0: not grouped, and the rest does not matter
  int64_t bits, zero, minimums;  // 4 or 8; the code that stands for 0; whether groups have minimums
};

struct Destination {
  Output kind;
  void* data;
  int64_t stride;  // elements from row to row; blocks of 32 columns for packed rows
  float multiplier;
};

// A low-rank update (Hu et al. 2021) of columns [first, first + 32 * blocks) of a linear layer's output: `a` (rank, in), and
// `b` as [blocks][rank][32], which has the scale. Mirrored in binding.py.
struct LowRank {
  const bf16 *a, *b;
  int64_t rank, first, blocks;  // `rank` is at most kMaxRank, `first` a multiple of 32
};

constexpr int kMaxRank = 256;

// The updates of a linear layer by one adapter.
struct Updates {
  const LowRank* parts;
  int64_t count;
};

// The updates of a linear layer by all adapters: of adapter i at `of[i * stride]`. `tokens` has each token's adapter, -1
// for none, and `sums` room for (tokens, out) float32, where out is filled up to whole blocks.
struct Adapted {
  const Updates* of;
  int64_t stride;
  const int64_t* tokens;
  float* sums;
};

int64_t packed_bytes(int64_t out, int64_t in);
void pack_weight(const bf16* weight, int64_t out, int64_t in, bf16* tiles);
// Takes `rows` rows of 32 sums, `sums[row * 32 + column]`, from token `token` and column block `block` on.
void put(const float* sums, int rows, int64_t token, int64_t block, const Weight& weight, const Destination& to,
         bool past_cache);
void linear_grouped(const bf16* packed, int64_t tokens, const Weight& weight, const Destination& to, int threads);
void linear_int8(const bf16* packed, int64_t tokens, const Weight& weight, const Destination& to, int threads);
void linear(const bf16* packed, int64_t tokens, const Weight& weight, const Destination& to, int threads);
// The same with the updates of each token's adapter, added in float32. A token without one has the bits of `linear`.
void linear_adapted(const bf16* packed, int64_t tokens, const Weight& weight, const Destination& to,
                    const Adapted& adapted, int threads);

}  // namespace ponder
