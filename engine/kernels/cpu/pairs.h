// Products of tiles without AMX: pairs of bfloat16 are multiplied and both products added to a float32, by one
// instruction of AVX512-BF16, else by two of float32.
//
// One side lies as tiles of 16 pairs by 16 columns, a register a pair; of the other side one pair at a time is broadcast.
// A sum has one accumulator, which takes its pairs in their order: its bits depend on neither how many rows nor how many
// columns are computed beside it, and any split of the work gives the same.
#pragma once

#ifndef __AMX_TILE__

#include "tiles.h"

namespace ponder {

#ifdef __AVX512F__
constexpr int kPairRows = 8;  // rows that are multiplied together at most, a part of a tile: their sums stay in registers
#else
constexpr int kPairRows = 4;
#endif
constexpr int64_t kPairAhead = 2048;  // bytes of each stream of weights that are prefetched

inline Ints pair_of(const bf16* at) {
  int32_t both;
  std::memcpy(&both, at, 4);
  return splat_int(both);
}

template <int kRows, int kBlocks>
inline void multiply_some(const bf16* rows, const bf16* panel, int64_t steps, float* sums) {
  Floats all[2][kRows][kBlocks];
  for (auto& half : all)
    for (auto& row : half)
      for (auto& sum : row) sum = zeros();
  // The halves of a block one after the other: a processor reads ahead best where addresses follow each other.
  for (int64_t step = 0; step < steps; ++step)
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half)
#pragma GCC unroll 4
      for (int pair = 0; pair < 16; ++pair) {
        const bf16* x = rows + step * kTileElements + pair * 2;
        Ints weights[kBlocks];
#pragma GCC unroll 4
        for (int i = 0; i < kBlocks; ++i) {
          const bf16* at = panel + (i * steps + step) * 1024 + half * 512 + pair * 32;
          weights[i] = load_ints(at);
          __builtin_prefetch(reinterpret_cast<const char*>(at) + kPairAhead, 0, 3);
        }
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const Ints both = pair_of(x + row * 32);
#pragma GCC unroll 4
          for (int i = 0; i < kBlocks; ++i) all[half][row][i] = dot_pairs(all[half][row][i], both, weights[i]);
        }
      }
  for (int row = 0; row < kRows; ++row)
    for (int i = 0; i < kBlocks; ++i)
      for (int half = 0; half < 2; ++half)
        store(sums + (i * kPairRows + row) * 32 + half * 16, all[half][row][i]);
}

// `rows` packed rows, from the first or the ninth of a tile on, times kBlocks blocks of 32 columns: sums[block][row][32].
template <int kBlocks>
inline void multiply_pairs(const bf16* packed, int rows, const bf16* panel, int64_t steps, float* sums) {
  if (rows == 1) return multiply_some<1, kBlocks>(packed, panel, steps, sums);
  if (rows == 2) return multiply_some<2, kBlocks>(packed, panel, steps, sums);
  if constexpr (kBlocks == 1) {
    if (rows == 3) return multiply_some<3, 1>(packed, panel, steps, sums);
    if (rows == 4) return multiply_some<4, 1>(packed, panel, steps, sums);
  }
#ifdef __AVX512F__
  if constexpr (kBlocks == 1) {
    if (rows == 5) return multiply_some<5, 1>(packed, panel, steps, sums);
    if (rows == 6) return multiply_some<6, 1>(packed, panel, steps, sums);
    if (rows == 7) return multiply_some<7, 1>(packed, panel, steps, sums);
    multiply_some<8, 1>(packed, panel, steps, sums);
  }
#endif
}

#ifndef __AVX512F__
// Up to kWideRows rows as float32, [columns / 16][kWideRows][16], times a block of 32 columns, added to sums[row][32] with
// the bits of multiply_pairs. Without an instruction for pairs that one widens its rows for every block again, which takes
// as long as their products.
constexpr int kWideRows = 5;
constexpr int64_t kWideSteps = 8;  // whose weights, 16 KB, stay in the first cache for some groups of rows

template <int kRows>
inline void multiply_wide_some(const float* rows, const bf16* panel, int64_t steps, float* sums) {
  for (int half = 0; half < 2; ++half) {
    Floats all[kRows];
    for (int row = 0; row < kRows; ++row) all[row] = load(sums + row * 32 + half * 16);
    const float* x = rows;
    for (int64_t step = 0; step < steps; ++step)
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part, x += kWideRows * 16)
#pragma GCC unroll 8
        for (int pair = 0; pair < 8; ++pair) {
          const Ints weights = load_ints(panel + step * 1024 + half * 512 + part * 256 + pair * 32);
          const Floats first = first_of(weights), second = second_of(weights);
#pragma GCC unroll 5
          for (int row = 0; row < kRows; ++row) all[row] = fmadd(splat(x[row * 16 + pair * 2]), first, all[row]);
#pragma GCC unroll 5
          for (int row = 0; row < kRows; ++row) all[row] = fmadd(splat(x[row * 16 + pair * 2 + 1]), second, all[row]);
        }
    for (int row = 0; row < kRows; ++row) store(sums + row * 32 + half * 16, all[row]);
  }
}

inline void multiply_wide(const float* rows, int count, const bf16* panel, int64_t steps, float* sums) {
  switch (count) {
    case 1: return multiply_wide_some<1>(rows, panel, steps, sums);
    case 2: return multiply_wide_some<2>(rows, panel, steps, sums);
    case 3: return multiply_wide_some<3>(rows, panel, steps, sums);
    case 4: return multiply_wide_some<4>(rows, panel, steps, sums);
    default: multiply_wide_some<5>(rows, panel, steps, sums);
  }
}
#endif

// 16 rows, `stride` elements apart, times `steps` tiles of 16 columns: sums[row][16], of which `columns` are needed.
inline void multiply_rows(const bf16* rows, int64_t stride, const bf16* tiles, int64_t steps, [[maybe_unused]] int columns,
                          float* sums) {
#ifdef __AVX512BF16__
  if (columns <= 8) {
    __m256 all[16];
    for (int row = 0; row < 16; ++row) all[row] = _mm256_setzero_ps();
    for (int64_t step = 0; step < steps; ++step)
#pragma GCC unroll 2
      for (int pair = 0; pair < 16; ++pair) {
        const __m256bh right = (__m256bh)_mm256_load_si256(
            reinterpret_cast<const __m256i*>(tiles + step * kTileElements + pair * 32));
        const bf16* at = rows + step * 32 + pair * 2;
#pragma GCC unroll 16
        for (int row = 0; row < 16; ++row) {
          int32_t both;
          std::memcpy(&both, at + row * stride, 4);
          all[row] = _mm256_dpbf16_ps(all[row], (__m256bh)_mm256_set1_epi32(both), right);
        }
      }
    for (int row = 0; row < 16; ++row) _mm512_store_ps(sums + row * 16, _mm512_zextps256_ps512(all[row]));
    return;
  }
#endif
#ifdef __AVX512F__
  constexpr int kRows = 16;
#else
  constexpr int kRows = 4;
#endif
  for (int first = 0; first < 16; first += kRows) {
    Floats all[kRows];
    for (int row = 0; row < kRows; ++row) all[row] = zeros();
    for (int64_t step = 0; step < steps; ++step)
#pragma GCC unroll 2
      for (int pair = 0; pair < 16; ++pair) {
        const Ints right = load_ints(tiles + step * kTileElements + pair * 32);
        const bf16* at = rows + first * stride + step * 32 + pair * 2;
#pragma GCC unroll 16
        for (int row = 0; row < kRows; ++row) all[row] = dot_pairs(all[row], pair_of(at + row * stride), right);
      }
    for (int row = 0; row < kRows; ++row) store(sums + (first + row) * 16, all[row]);
  }
}

template <int kRows>
inline void weigh_some(const bf16* weights, const bf16* values, int64_t half, float* sums, int64_t width) {
  Floats low[kRows], high[kRows];
  for (int row = 0; row < kRows; ++row) low[row] = high[row] = zeros();
  for (int part = 0; part < 2; ++part)
#pragma GCC unroll 4
    for (int pair = 0; pair < 16; ++pair) {
      const bf16* at = values + part * half + pair * 32;
      const Ints left = load_ints(at), right = load_ints(at + kTileElements);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        const Ints both = pair_of(weights + part * kTileElements + row * 32 + pair * 2);
        low[row] = dot_pairs(low[row], both, left);
        high[row] = dot_pairs(high[row], both, right);
      }
    }
  for (int row = 0; row < kRows; ++row) {
    store(sums + row * width, low[row]);
    store(sums + row * width + 16, high[row]);
  }
}

// Up to four rows of 64 weights, two tiles, times 32 columns of 64 values, two pairs of tiles `half` elements apart.
inline void weigh_pairs(const bf16* weights, int rows, const bf16* values, int64_t half, float* sums, int64_t width) {
  switch (rows) {
    case 1: return weigh_some<1>(weights, values, half, sums, width);
    case 2: return weigh_some<2>(weights, values, half, sums, width);
    case 3: return weigh_some<3>(weights, values, half, sums, width);
    default: weigh_some<4>(weights, values, half, sums, width);
  }
}

}  // namespace ponder

#endif
