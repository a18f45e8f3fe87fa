// What happens to single tokens between linear layers. See rows.cpp.
#pragma once

#include "attention.h"

namespace ponder {

// RMSNorm of rows of `width` elements, a multiple of 32, to packed rows, or LayerNorm if `centred`; a null weight copies.
void norm_packed(const bf16* rows, int64_t tokens, int64_t width, const float* weight, float eps, bool centred,
                 bf16* packed, int threads);
// The same to rows as they are.
void norm_rows(const bf16* rows, int64_t tokens, int64_t width, const float* weight, float eps, bool centred, bf16* to,
               int threads);
// rows += multiplier * update, which is rounded to bfloat16 first.
void add_floats(bf16* rows, const float* update, int64_t tokens, int64_t width, float multiplier, int threads);
// rows += multiplier * norm(update).
void norm_add(bf16* rows, const bf16* update, int64_t tokens, int64_t width, const float* weight, float eps,
              bool centred, float multiplier, int threads);

struct Heads {
  int64_t heads, kv_heads, width;  // width of one head, a multiple of 32
  const float* head_norm;          // (heads + kv_heads, width): each head is normed, or null
  const float *query_norm, *key_norm;  // over all heads of the projection at once, or null
  float eps;
  bool centred;  // norms subtract the mean first
  const float *key_rotations, *query_rotations;  // (tokens, width / 2) of cosine and sine, or null
};

// Norms and rotates queries and keys of `qkv` (tokens, (heads + 2 * kv_heads) * width): queries in place, keys and
// values to their slots of the cache.
void place(bf16* qkv, int64_t tokens, const Heads& heads, const int64_t* slots, const PagedLayer& cache, int threads);

struct Convolution {
  const float* taps;  // (count, width), the current token's last
  int64_t count, width;  // of the model, a multiple of 32
  const int64_t *slots, *tables, *starts, *contexts;  // as in engine.batch.Batch
  int64_t table_stride, rows, block_size;
  bf16 *low, *high;  // what each slot holds, in two halves: (slots, width / 2)
  Branches branches;
};

// The gated short convolution of `joined` (tokens, 3 * width): gate in, gate out, values. The gated values go to their
// slots; each token mixes those of its last `count` tokens, and is gated to packed rows.
void convolve(const bf16* joined, int64_t tokens, const Convolution& convolution, bf16* packed, int threads);

}  // namespace ponder
