// Sixteen numbers at once, a register of AVX-512, two of AVX2 or four of NEON, so that every kernel is written once for
// all. Knows nothing of layouts.
//
// A result has the same bits on all where the arithmetic is float32 or integer; products of bfloat16 pairs differ in
// their rounding where AVX512-BF16 does them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ponder {

using bf16 = uint16_t;

}  // namespace ponder

#if defined(__AVX512F__)
#include "avx512.h"
#elif defined(__AVX2__)
#include "avx2.h"
#else
#include "neon.h"
#endif

namespace ponder {

// sum + the products of 16 pairs of bfloat16.
inline Floats dot_pairs(Floats sum, Ints x, Ints y) {
#ifdef __AVX512BF16__
  return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y);
#else
  return fmadd(second_of(x), second_of(y), fmadd(first_of(x), first_of(y), sum));
#endif
}

// 2 ** x, relative error under 4e-6 (a polynomial of degree 4 on [-0.5, 0.5]), for results that bfloat16 holds. Below the
// normal numbers it is 0, also for -inf: a result that is less than normal takes the processor more than a hundred cycles.
// From 128 on it is inf.
inline Floats exp2_16(Floats x) {
  const Floats least = splat(-126.0f), bounded = min(max(x, least), splat(128.0f));
  const Floats whole = rounded(bounded), rest = sub(bounded, whole);
  Floats y = splat(9.6004092e-3f);
  y = fmadd(y, rest, splat(5.5916977e-2f));
  y = fmadd(y, rest, splat(2.4023719e-1f));
  y = fmadd(y, rest, splat(6.9312198e-1f));
  y = fmadd(y, rest, splat(1.0f));
  return scale_above(x, least, y, whole);
}

}  // namespace ponder
