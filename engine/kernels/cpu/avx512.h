// The sixteen numbers of lanes.h in a register of AVX-512.
#pragma once

#include <immintrin.h>

namespace ponder {

using Floats = __m512;
using Ints = __m512i;

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
inline Floats add(Floats x, Floats y) { return _mm512_add_ps(x, y); }
inline Floats sub(Floats x, Floats y) { return _mm512_sub_ps(x, y); }
inline Floats mul(Floats x, Floats y) { return _mm512_mul_ps(x, y); }
inline Floats div(Floats x, Floats y) { return _mm512_div_ps(x, y); }
inline Floats max(Floats x, Floats y) { return _mm512_max_ps(x, y); }
inline Floats min(Floats x, Floats y) { return _mm512_min_ps(x, y); }
inline Floats absolute(Floats x) { return _mm512_abs_ps(x); }
inline Floats fmadd(Floats x, Floats y, Floats z) { return _mm512_fmadd_ps(x, y, z); }
inline Floats fmsub(Floats x, Floats y, Floats z) { return _mm512_fmsub_ps(x, y, z); }
inline float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
inline float max_of(Floats x) { return _mm512_reduce_max_ps(x); }
inline Floats rounded(Floats x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// y * 2 ** whole, and 0 where x is not above `least`. `whole` is at most 128, and y then at most 1.
inline Floats scale_above(Floats x, Floats least, Floats y, Floats whole) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, least, _CMP_GT_OQ), y, whole);
}
// Pairs (real, imaginary) times pairs (cosine, sine).
inline Floats turned(Floats pairs, Floats turn) {
  return _mm512_fmaddsub_ps(pairs, _mm512_moveldup_ps(turn),
                            _mm512_mul_ps(_mm512_permute_ps(pairs, 0xb1), _mm512_movehdup_ps(turn)));
}

inline Ints splat_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints load_ints(const void* from) { return _mm512_loadu_si512(from); }
inline void store_ints(void* to, Ints x) { _mm512_storeu_si512(to, x); }
inline Ints zero_ints() { return _mm512_setzero_si512(); }
inline Ints add_ints(Ints x, Ints y) { return _mm512_add_epi32(x, y); }
inline Ints and_ints(Ints x, Ints y) { return _mm512_and_si512(x, y); }
inline Ints or_ints(Ints x, Ints y) { return _mm512_or_si512(x, y); }
inline Ints shift_right_4(Ints x) { return _mm512_srli_epi32(x, 4); }
inline int32_t sum_of(Ints x) { return _mm512_reduce_add_epi32(x); }
inline Ints load_bytes(const uint8_t* from) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Ints to_ints(Floats x) { return _mm512_cvtps_epi32(x); }
inline void store_bytes(int8_t* to, Ints x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
}
// Blends in `other` where key is outside [first, last].
inline Floats outside(Floats x, Ints key, Ints first, Ints last, Floats other) {
  return _mm512_mask_blend_ps(_mm512_cmpgt_epi32_mask(key, last) | _mm512_cmpgt_epi32_mask(first, key), x, other);
}

inline Floats load16(const bf16* from) {
  const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}
inline Floats load_half(const void* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
}
#ifdef __AVX512BF16__
inline __m256i narrow(Floats x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline __m512i narrow32(Floats low, Floats high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
#else
inline Ints round_up(Floats x) {  // to nearest, ties to even; the upper 16 bits are the result
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i made = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_mask_mov_epi32(made, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
}
inline __m256i narrow(Floats x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_up(x), 16)); }
inline __m512i narrow32(Floats low, Floats high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(low)), narrow(high), 1);
}
#endif
inline void store16(bf16* to, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(x)); }
inline void store32(bf16* to, Floats low, Floats high) { _mm512_storeu_si512(to, narrow32(low, high)); }
inline void stream32(bf16* to, Floats low, Floats high) {  // past the cache; `to` is a multiple of 64
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), narrow32(low, high));
}
// Pairs of bfloat16 (x, y).
inline Ints pair_up(Floats x, Floats y) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(narrow(x)), _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(y)), 16));
}
// The 32 pairs of x's and y's bfloat16 at the same place, 16 to each of `low` and `high`.
inline void interleave(Ints x, Ints y, bf16* low, bf16* high) {
  alignas(64) static const uint16_t order[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first = _mm512_load_si512(order), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  _mm512_storeu_si512(low, _mm512_permutex2var_epi16(x, first, y));
  _mm512_storeu_si512(high, _mm512_permutex2var_epi16(x, second, y));
}

inline void transpose16(Ints (&r)[16]) {
  Ints t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

// The first and the second of each pair of bfloat16.
inline Floats first_of(Ints pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline Floats second_of(Ints pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, splat_int(static_cast<int32_t>(0xffff0000))));
}

// sum + for each lane the products of its four bytes: unsigned in `codes`, signed in x.
constexpr int kCodeOffset = 0;  // subtracted from codes of 8 bits by dot_bytes
inline Ints dot_bytes(Ints sum, Ints codes, Ints x) { return _mm512_dpbusd_epi32(sum, codes, x); }
inline Ints dot_nibbles(Ints sum, Ints codes, Ints x) { return _mm512_dpbusd_epi32(sum, codes, x); }

inline void finish_streams() { _mm_sfence(); }  // stores past the cache are seen by other threads from here on

}  // namespace ponder
