/* Numbers of bfloat16: how they are rounded, and which vectors and tiles of this processor take them. */
#pragma once

#include "vectors.h"

/* To the nearest number of bfloat16, ties to even, as tiles round. */
INLINE float halved(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &bits, 4);
    return x;
}

/* Rows of a tile, and numbers of a row of the left one. */
enum { SIDE = 16, DEPTH = 32 };

/* Vectors of SIDE numbers with masks. */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HAVE_LANES 1
INLINE __mmask16 first_lanes(int64_t n) { return n >= WIDTH ? 0xffff : n > 0 ? (1u << n) - 1 : 0; }
#else
#define HAVE_LANES 0
#endif

/* The same of SIDE numbers; a NaN stays one. */
#if HAVE_LANES
INLINE __m256i halved_lanes(__m512 x) {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    __m512i bits = (__m512i)x, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    bits = _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
#endif
}
#endif

/* And products of pairs of numbers of bfloat16. */
#if HAVE_LANES && defined(__AVX512BF16__)
#define HAVE_PAIRS 1
#else
#define HAVE_PAIRS 0
#endif

#if HAVE_PAIRS && defined(__AMX_BF16__) && defined(__linux__)
#define HAVE_TILES 1
#include <sys/syscall.h>
#include <unistd.h>

/* Linux lends tiles, state 18 of a processor, to those who ask: ARCH_REQ_XCOMP_PERM. */
static int tiles_at_hand(void) {
    static int known = -1;
    if (known < 0) known = !syscall(SYS_arch_prctl, 0x1023, 18);
    return known;
}

/* Whether products are rounded: if wanted, and of rows enough to fill a tile. Tiles are a thread's own, and others set them
   differently; they are to be given back by `end_halves`. */
SHARED int begin_halves(int wanted, int64_t rows) {
    if (!wanted || rows < SIDE || !tiles_at_hand()) return 0;
    struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int t = 0; t < 8; t++) shape.bytes[t] = 4 * SIDE, shape.rows[t] = SIDE;
    __asm__ volatile("ldtilecfg %0" ::"m"(shape) : "memory");
    return 1;
}

INLINE void end_halves(int half) {
    if (half) __asm__ volatile("tilerelease" ::: "memory");
}
#else
#define HAVE_TILES 0
BEGIN_STAND_INS
INLINE int tiles_at_hand(void) { return 0; }
INLINE int begin_halves(int wanted, int64_t rows) { return HAVE_PAIRS && wanted && rows >= SIDE; }
INLINE void end_halves(int half) {}
END_STAND_INS
#endif
