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

// A weight (columns out, columns in) as tiles, with its scales and bias. Mirrored in binding.py.
struct Weight {
  const void* tiles;
  const float* bias;    // (out,) or null
  const float* scales;  // (out,): float32 of one step of int8; null for bfloat16
  int64_t out, in;      // `in` is a multiple of 32 (bfloat16) or 64 (int8)
  int64_t eight_bits_from;  // with int8: so many tokens are rounded to 8 bits too, fewer keep 16
};

struct Destination {
  Output kind;
  void* data;
  int64_t stride;  // elements from row to row; blocks of 32 columns for packed rows
  float multiplier;
};

int64_t packed_bytes(int64_t out, int64_t in);
void pack_weight(const bf16* weight, int64_t out, int64_t in, bf16* tiles);
// Takes `rows` rows of 32 sums, `sums[row * 32 + column]`, from token `token` and column block `block` on.
void put(const float* sums, int rows, int64_t token, int64_t block, const Weight& weight, const Destination& to,
         bool past_cache);
void linear_int8(const bf16* packed, int64_t tokens, const Weight& weight, const Destination& to, int threads);
void linear(const bf16* packed, int64_t tokens, const Weight& weight, const Destination& to, int threads);

}  // namespace ponder
