// Attention over the paged cache, and the two formats that its keys and values have. See attention.cpp.
//
// In 4 bits a token's key and value of each head have a scale and a minimum for each group of columns. Keys are rotated by
// a Hadamard matrix first, which spreads a channel of large numbers over all of them; queries are rotated alike, which
// leaves the scores as they are.
#pragma once

#include <cmath>

#include "tiles.h"

namespace ponder {

constexpr int64_t kCodeGroup = 32;    // columns of a scale
constexpr int64_t kMaxCodeWidth = 512;  // of a head

// A layer of the cache: bfloat16 (slots, kv_heads, width); or, where there are scales, codes of 4 bits (slots, kv_heads,
// width / 2), and scale and minimum of each group (slots, kv_heads, width / kCodeGroup, 2). 32 codes are 16 bytes, byte i
// with column i below column i + 16.
struct PagedLayer {
  void *keys, *values;
  bf16 *key_scales, *value_scales;  // or null

  bool quantized() const { return key_scales != nullptr; }
};

// Branches of token trees, as in engine.batch.Branches: (rows,) and (rows, stride), or null.
struct Branches {
  const int64_t *starts, *slots;
  int64_t stride;

  // The position from which on a row with this context has slots of its own.
  int64_t begin(int64_t row, int64_t context) const { return starts ? starts[row] : context; }
  int64_t slot(int64_t row, int64_t position) const { return slots[row * stride + position - starts[row]]; }
};

struct Attention {
  const bf16* queries;  // (tokens, heads * width), rows `query_stride` apart
  int64_t query_stride;
  PagedLayer cache;
  int64_t block_size, heads, kv_heads, width;
  const int64_t* tables;  // (rows, table_stride)
  int64_t table_stride, rows;
  const int64_t *starts, *contexts;  // (rows + 1,) and (rows,), as in engine.batch.Batch
  int64_t window;                    // 0: the whole context
  float scale;
  bf16* out;  // packed rows of width heads * width
  Branches branches;
  const int64_t* last_keys;  // (tokens,) the last position that each sees, within the row's context; null: its own
};

void attend(const Attention& attention, int threads);

// One of log2(size) passes over `size` numbers: sums and differences of the halves, in turn.
inline void butterfly(const float* __restrict from, float* __restrict to, int64_t size) {
  for (int64_t i = 0; i < size / 2; ++i) {
    const float a = from[i], b = from[i + size / 2];
    to[2 * i] = a + b;
    to[2 * i + 1] = a - b;
  }
}

// Multiplies `width` numbers, a multiple of 32, by the orthogonal Hadamard matrix of the largest power of two that divides
// `width`, block by block: its own inverse.
inline void rotate_head(float* head, int64_t width) {
  alignas(64) float rooms[2][kMaxCodeWidth];
  const int64_t size = width & -width;
  const Floats norm = splat(1.0f / std::sqrt(static_cast<float>(size)));
  for (float* block = head; block < head + width; block += size) {
    const float* from = block;
    int room = 0;
    for (int64_t left = size; left > 1; left /= 2, room ^= 1) {
      butterfly(from, rooms[room], size);
      from = rooms[room];
    }
    for (int64_t at = 0; at < size; at += 16) store(block + at, mul(load(from + at), norm));
  }
}

inline float widened(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float made;
  std::memcpy(&made, &bits, 4);
  return made;
}

inline bf16 rounded_to_bf16(float x) {
  bf16 made[16];
  store16(made, splat(x));
  return made[0];
}

// Rounds a head to codes, scales and minimums.
inline void encode_head(const float* head, int64_t width, uint8_t* codes, bf16* scales) {
  const Floats last = splat(15.0f);
  for (int64_t at = 0; at < width; at += kCodeGroup, codes += kCodeGroup / 2, scales += 2) {
    const Floats low = load(head + at), high = load(head + at + 16);
    const float most = max_of(max(low, high));
    const float least = 0.0f - max_of(max(sub(zeros(), low), sub(zeros(), high)));
    scales[0] = rounded_to_bf16(std::fmax((most - least) / 15.0f, 0x1p-100f));
    scales[1] = rounded_to_bf16(least);
    const Floats step = splat(widened(scales[0])), first = splat(widened(scales[1]));
    const auto code = [&](Floats x) {
      const Floats nearest = max(rounded(div(sub(x, first), step)), zeros());
      return sub(last, max(sub(last, nearest), zeros()));
    };
    int32_t both[16];
    store_ints(both, to_ints(fmadd(code(high), splat(16.0f), code(low))));
    for (int i = 0; i < 16; ++i) codes[i] = static_cast<uint8_t>(both[i]);
  }
}

// The numbers of one group.
inline void decode_group(const uint8_t* codes, const bf16* scales, Floats& low, Floats& high) {
  const Ints both = load_bytes(codes);
  const Floats step = splat(widened(scales[0])), first = splat(widened(scales[1]));
  low = fmadd(to_floats(and_ints(both, splat_int(15))), step, first);
  high = fmadd(to_floats(shift_right_4(both)), step, first);
}

}  // namespace ponder
