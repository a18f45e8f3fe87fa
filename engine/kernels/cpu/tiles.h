// Tiles, bfloat16 and the layouts that all kernels share. Knows nothing of layers.
//
// A tile is 16 rows of 64 bytes: a register of AMX, or, compiled without AMX, memory that AVX512-BF16 reads
// (pairs.h). The layouts are the same, and so is a kernel's promise: a sum runs over its terms in one order.
//
// "Packed rows" are activations (tokens, width) as tiles of 16 tokens by 32 columns, [tokens / 16][width / 32][16][32]:
// the contents of a tile register lie together, and rows a power of two apart do not fight for the same cache lines. Every
// kernel that feeds a linear layer writes packed rows.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ponder {

using bf16 = uint16_t;

constexpr int kTileRows = 16;
constexpr int kTileElements = 512;  // 16 rows of 32 bfloat16

#ifdef __AMX_TILE__
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// All eight tiles 64 bytes wide; tile i has rows[i] rows.
inline void configure_tiles(const int (&rows)[8]) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = static_cast<uint8_t>(rows[i]);
  }
  asm volatile("" ::"r"(&config) : "memory");  // the intrinsic does not say that it reads all 64 bytes
  _tile_loadconfig(&config);
}

inline void release_tiles() { _tile_release(); }
#else
inline void release_tiles() {}
#endif

// Makes earlier stores visible to the tile loads after it: their intrinsics do not say that they read memory.
inline void before_tiles() { asm volatile("" ::: "memory"); }

inline __m512 widen(__m256i values) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16)); }
inline __m512 load16(const bf16* from) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
inline __m256i narrow(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }
inline void store16(bf16* to, __m512 values) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(values)); }
inline __m512i narrow32(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// Where column `column` of token `token` is in packed rows of width 32 * blocks.
inline size_t packed_at(size_t token, size_t blocks, size_t column) {
  return (token / 16 * blocks + column / 32) * kTileElements + token % 16 * 32 + column % 32;
}

// 2 ** x, relative error under 4e-6 (a polynomial of degree 4 on [-0.5, 0.5]), for results that bfloat16 holds. Below the
// normal numbers it is 0, also for -inf: a result that is less than normal takes the processor more than a hundred cycles.
inline __m512 exp2_16(__m512 x) {
  const __m512 least = _mm512_set1_ps(-126.0f);
  const __mmask16 normal = _mm512_cmp_ps_mask(x, least, _CMP_GT_OQ);
  x = _mm512_max_ps(x, least);
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 rest = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(9.6004092e-3f);
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(5.5916977e-2f));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(2.4023719e-1f));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(6.9312198e-1f));
  y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(normal, y, whole);
}

}  // namespace ponder
