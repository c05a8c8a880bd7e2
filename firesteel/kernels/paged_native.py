"""`paged`'s two passes in C, for contiguous float32 on a CPU.

Keys of a block lie with their dimensions outermost, so that the scores of its 16 positions are one vector; values lie the other way
round, so that a position's share is added to an output row as one vector. Several queries of the same sequence and key head go
through a block together, while it is in the first cache level.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from firesteel.kernels.native import EXP, load

BLOCK = 16
SOURCE = (
    EXP
    + r"""
#include <math.h>
#include <string.h>
#include <stdlib.h>
#define B 16
#define ROWS 24 /* queries that go through a block of keys together */
#define MAX_DIM 256

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));

static void turn(float *x, const float *cos, const float *sin, const float *norm, float eps, long d, int stride, int offset) {
  if (norm) {
    float s = 0;
    #pragma omp simd reduction(+:s)
    for (long i = 0; i < d; i++) s += x[i] * x[i];
    float f = 1.0f / sqrtf(s / d + eps);
    for (long i = 0; i < d; i++) x[i] *= f * norm[i];
  }
  for (long i = 0; i < d / 2; i++) {
    float *a = x + i * stride, *b = a + offset, u = *a, v = *b;
    *a = u * cos[i] - v * sin[i];
    *b = v * cos[i] + u * sin[i];
  }
}

/* rows of [queries | keys | values] heads: norm and rotation in place for queries and keys; keys and values into the cache */
void rotate_and_store(float *x, long n, long queries, long heads, long d, const float *norm, float eps, const float *cos, const float *sin,
                      int stride, int offset, const int *position, const int *place, float *keys, float *values, int threads) {
  long width = (queries + 2 * heads) * d;
  #pragma omp parallel for num_threads(threads) if (n > 4)
  for (long i = 0; i < n; i++) {
    float *row = x + i * width;
    const float *c = cos + (long)position[i] * (d / 2), *s = sin + (long)position[i] * (d / 2);
    for (long h = 0; h < queries + heads; h++) turn(row + h * d, c, s, norm ? norm + h * d : 0, eps, d, stride, offset);
    long block = place[i] / B, slot = place[i] % B;
    for (long h = 0; h < heads; h++) {
      const float *k = row + (queries + h) * d, *v = k + heads * d;
      float *kc = keys + (block * heads + h) * d * B, *vc = values + (block * heads + h) * d * B;
      for (long j = 0; j < d; j++) kc[j * B + slot] = k[j];
      memcpy(vc + slot * d, v, d * sizeof(float));
    }
  }
}

/* scores of up to 4 queries against a block of keys */
static inline __attribute__((always_inline)) void scores(const float *const *q, const float *k, long d, float *out, const int n) {
  vec a[4];
  for (int r = 0; r < n; r++) a[r] = (vec){0};
  for (long j = 0; j < d; j++) {
    vec kv = *(const vec *)(k + j * B);
    for (int r = 0; r < n; r++) a[r] += q[r][j] * kv;
  }
  for (int r = 0; r < n; r++) *(vec *)(out + r * B) = a[r];
}

/* up to 4 output rows, each faded and given its shares p of the slots begin .. end of a block of values */
static inline __attribute__((always_inline)) void mix(const float *p, const float *fade, const float *v, long d, int begin, int end, float *out, const int n) {
  long c = 0;
  for (; c + 16 <= d; c += 16) {
    vec y[4];
    for (int r = 0; r < n; r++) y[r] = *(const vec *)(out + r * d + c) * fade[r];
    for (int j = begin; j < end; j++) {
      vec share = *(const vec *)(v + j * d + c);
      for (int r = 0; r < n; r++) y[r] += p[r * B + j] * share;
    }
    for (int r = 0; r < n; r++) *(vec *)(out + r * d + c) = y[r];
  }
  for (; c < d; c++)
    for (int r = 0; r < n; r++) {
      float y = out[r * d + c] * fade[r];
      for (int j = begin; j < end; j++) y += p[r * B + j] * v[j * d + c];
      out[r * d + c] = y;
    }
}

/* f for 4 of the rows at a time, and for the rest together: several sums in flight, each number of a block read once */
#define FOUR(f, ...) { \
    long r = 0; \
    for (; r + 4 <= rows; r += 4) f(__VA_ARGS__, 4); \
    if (rows - r == 3) f(__VA_ARGS__, 3); \
    else if (rows - r == 2) f(__VA_ARGS__, 2); \
    else if (rows - r == 1) f(__VA_ARGS__, 1); \
  }

/* one tile: `tokens` consecutive tokens of one sequence and the `group` queries of each that share key head h */
static void tile(const float *x, float *out, long width, long queries, long heads, long group, long h, long d, long first, long tokens,
                 const int *low, const int *high, const int *table, const float *keys, const float *values, float scale) {
  long rows = tokens * group;
  const float *q[ROWS];
  float acc[ROWS * MAX_DIM], top[ROWS], sum[ROWS], fade[ROWS], s[ROWS * B];
  int from = low[first], to = high[first];
  for (long t = 0; t < tokens; t++) {
    if (low[first + t] < from) from = low[first + t];
    if (high[first + t] > to) to = high[first + t];
    for (long g = 0; g < group; g++) q[t * group + g] = x + (first + t) * width + (h * group + g) * d;
  }
  for (long r = 0; r < rows; r++) { top[r] = -INFINITY; sum[r] = 0; }
  memset(acc, 0, rows * d * sizeof(float));
  for (long b = from / B; b * B < to; b++) {
    const float *k = keys + (table[b] * heads + h) * d * B, *v = values + (table[b] * heads + h) * d * B;
    if ((b + 1) * B < to) { /* blocks lie anywhere: processors do not fetch ahead from one to the next by themselves */
      const float *next = keys + (table[b + 1] * heads + h) * d * B, *after = values + (table[b + 1] * heads + h) * d * B;
      for (long j = 0; j < d * B; j += 16) { __builtin_prefetch(next + j); __builtin_prefetch(after + j); }
    }
    FOUR(scores, q + r, k, d, s + r * B)
    int from_slot = B, to_slot = 0;
    for (long r = 0; r < rows; r++) {
      float *p = s + r * B, peak = top[r], total = 0;
      int begin = low[first + r / group] - (int)(b * B), end = high[first + r / group] - (int)(b * B);
      if (begin < 0) begin = 0;
      if (end > B) end = B;
      if (begin >= end) {
        for (int j = 0; j < B; j++) p[j] = 0.0f;
        fade[r] = 1.0f;
        continue;
      }
      if (begin < from_slot) from_slot = begin;
      if (end > to_slot) to_slot = end;
      for (int j = 0; j < B; j++) p[j] = j >= begin && j < end ? p[j] * scale : -INFINITY;
      for (int j = 0; j < B; j++) peak = p[j] > peak ? p[j] : peak;
      fade[r] = e(top[r] - peak);
      top[r] = peak;
      for (int j = 0; j < B; j++) p[j] = j >= begin && j < end ? e(p[j] - peak) : 0.0f;
      for (int j = 0; j < B; j++) total += p[j];
      sum[r] = sum[r] * fade[r] + total;
    }
    FOUR(mix, s + r * B, fade + r, v, d, from_slot, to_slot, acc + r * d)
  }
  for (long r = 0; r < rows; r++) {
    float f = sum[r] > 0 ? 1.0f / sum[r] : 0.0f, *o = out + (first + r / group) * queries * d + (h * group + r % group) * d;
    for (long c = 0; c < d; c++) o[c] = acc[r * d + c] * f;
  }
}

/* tiles: first token, number of tokens, and where their sequence's blocks begin in `tables` */
void attend(const float *x, float *out, long queries, long heads, long d, long tiles, const int *tile_first, const int *tile_tokens,
            const int *tile_table, const int *low, const int *high, const int *tables, const float *keys, const float *values, float scale, int threads) {
  long width = (queries + 2 * heads) * d, group = queries / heads;
  #pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (long i = 0; i < tiles * heads; i++) {
    long t = i / heads;
    tile(x, out, width, queries, heads, group, i % heads, d, tile_first[t], tile_tokens[t], low, high, tables + tile_table[t], keys, values, scale);
  }
}
"""
)
ROWS, MAX_DIM = 24, 256


def library() -> ctypes.CDLL | None:
    """The compiled passes, or None where there is no compiler."""
    return load(SOURCE)


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def rotate_and_store(
    lib: ctypes.CDLL,
    x: Tensor,
    queries: int,
    heads: int,
    norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    position: Tensor,
    place: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    dim = keys.shape[2]
    lib.rotate_and_store(
        pointer(x),
        ctypes.c_long(x.shape[0]),
        ctypes.c_long(queries),
        ctypes.c_long(heads),
        ctypes.c_long(dim),
        pointer(norm),
        ctypes.c_float(eps),
        pointer(cos),
        pointer(sin),
        ctypes.c_int(2 if interleaved else 1),
        ctypes.c_int(1 if interleaved else dim // 2),
        pointer(position),
        pointer(place),
        pointer(keys),
        pointer(values),
        ctypes.c_int(torch.get_num_threads()),
    )


def attend(
    lib: ctypes.CDLL,
    x: Tensor,
    out: Tensor,
    queries: int,
    heads: int,
    tiles: tuple[Tensor, Tensor, Tensor],
    low: Tensor,
    high: Tensor,
    tables: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
) -> None:
    lib.attend(
        pointer(x),
        pointer(out),
        ctypes.c_long(queries),
        ctypes.c_long(heads),
        ctypes.c_long(keys.shape[2]),
        ctypes.c_long(tiles[0].shape[0]),
        *(pointer(t) for t in tiles),
        pointer(low),
        pointer(high),
        pointer(tables),
        pointer(keys),
        pointer(values),
        ctypes.c_float(scale),
        ctypes.c_int(torch.get_num_threads()),
    )
