"""The three elementwise passes of the fused loss in C: a row is walked in blocks that stay in the first cache level.

Same contract as the functions of the same names in `rowwise.py`, for contiguous float32 on CPU and without JSD.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from firesteel.kernels.native import EXP, load

SOURCE = (
    EXP
    + r"""
#include <math.h>
#define BLOCK 512

static inline float cap_of(float x, float cap) { return cap * (1.0f - 2.0f / (e(2.0f / cap * x) + 1.0f)); }
static inline long end(long b, long v) { return b + BLOCK < v ? b + BLOCK : v; }

static float largest(const float *x, long v) {
  float top = x[0];
  #pragma omp simd reduction(max:top)
  for (long j = 0; j < v; j++) top = x[j] > top ? x[j] : top;
  return top;
}
static double exp_sum(const float *x, long v, float shift) {
  double total = 0;
  for (long b = 0; b < v; b += BLOCK) {
    float s = 0;
    #pragma omp simd reduction(+:s)
    for (long j = b; j < end(b, v); j++) s += e(x[j] - shift);
    total += s;
  }
  return total;
}
static void apply_cap(float *x, long v, float cap) {
  #pragma omp simd
  for (long j = 0; j < v; j++) x[j] = cap_of(x[j], cap);
}

static inline __attribute__((always_inline)) double spread(const float *a, float *o, long v, float z, const int logs) {
  double total = 0;
  for (long b = 0; b < v; b += BLOCK) {
    float s = 0;
    #pragma omp simd reduction(+:s)
    for (long j = b; j < end(b, v); j++) {
      float l = a[j] - z, p = e(l);
      s += p;
      o[j] = logs ? l : p;
    }
    total += s;
  }
  return total;
}

void normalise_teacher(float *x, float *out, const float *norm, float cap, int logs, long n, long v, float *mass, float *top, int threads) {
  #pragma omp parallel for num_threads(threads)
  for (long i = 0; i < n; i++) {
    float *a = x + i * v, *o = out + i * v;
    if (cap > 0) apply_cap(a, v, cap);
    float high = largest(a, v);
    float z = norm ? norm[i] : high + (float)log(exp_sum(a, v, high));
    double total = logs ? spread(a, o, v, z, 1) : spread(a, o, v, z, 0);
    mass[i] = norm ? (float)total : 1.0f;
    top[i] = largest(o, v);
  }
}

void normalise_draft(float *x, float cap, long n, long v, float *norm, float *top, int threads) {
  #pragma omp parallel for num_threads(threads)
  for (long i = 0; i < n; i++) {
    float *a = x + i * v;
    if (cap > 0) apply_cap(a, v, cap);
    top[i] = largest(a, v);
    norm[i] = top[i] + (float)log(exp_sum(a, v, top[i]));
  }
}

/* one row; logs, cap_on and grad are constants at every call, so each call is its own loop */
static inline __attribute__((always_inline)) void row(
    float *restrict x, const float *restrict t, long v, float z, float top, float mass, float ce, float w, const float *mix, float cap,
    const int logs, const int cap_on, const int grad, float *tv, float *best, float *kl, float *rkl) {
  double l1 = 0, pull = 0, forward = 0, reverse = 0;
  float high = -INFINITY;
  for (long b = 0; b < v; b += BLOCK) {
    float a1 = 0, a2 = 0, a3 = 0, a4 = 0;
    #pragma omp simd reduction(+:a1,a2,a3,a4) reduction(max:high)
    for (long j = b; j < end(b, v); j++) {
      float lp = x[j] - z, p = e(lp), q = logs ? e(t[j]) : t[j], d = p - q;
      float s = (d > 0 ? 1.0f : 0.0f) - (d < 0 ? 1.0f : 0.0f);
      a1 += d * s;
      a2 += p * s;
      if (logs) { a3 += q * (t[j] - lp); a4 += p * (lp - t[j]); }
      float seen = x[j] == top ? t[j] : -INFINITY;
      high = seen > high ? seen : high;
    }
    l1 += a1; pull += a2; forward += a3; reverse += a4;
  }
  *best = high;
  *tv = (float)(0.5 * (l1 + 1.0 - mass));
  *kl = (float)(forward + 1.0 - mass);
  *rkl = (float)reverse;
  if (!grad) return;
  float half = 0.5f * mix[0], mk = logs ? mix[1] : 0, mr = logs ? mix[2] : 0;
  float own = ce + mk * mass - half * (float)pull - mr * (float)reverse;
  float c = cap_on ? 1.0f / cap : 0;
  #pragma omp simd
  for (long j = 0; j < v; j++) {
    float lp = x[j] - z, p = e(lp), q = logs ? e(t[j]) : t[j];
    float s = (p > q ? 1.0f : 0.0f) - (p < q ? 1.0f : 0.0f);
    float g = own + half * s;
    if (logs) g += mr * (lp - t[j]);
    g = p * g;
    if (logs) g -= mk * q;
    if (cap_on) { float y = x[j] * c; g *= 1.0f - y * y; }
    x[j] = g * w;
  }
}

void finish(float *x, const float *norm, const float *top, const long long *place, const float *mass, const float *teacher_top,
            const float *ce, const float *w, const float *teacher, const float *mix, float cap, int logs, int grad, long n, long v,
            float *tv, unsigned char *agree, float *kl, float *rkl, int threads) {
  #pragma omp parallel for num_threads(threads)
  for (long i = 0; i < n; i++) {
    float best, *a = x + i * v;
    const float *t = teacher + place[i] * v;
    #define GO(L, C, G) row(a, t, v, norm[i], top[i], mass[i], ce[i], w[i], mix, cap, L, C, G, tv + i, &best, kl + i, rkl + i)
    if (!grad) { if (logs) GO(1, 0, 0); else GO(0, 0, 0); }
    else if (cap > 0) { if (logs) GO(1, 1, 1); else GO(0, 1, 1); }
    else { if (logs) GO(1, 0, 1); else GO(0, 0, 1); }
    agree[i] = best == teacher_top[i];
  }
}
"""
)


def usable(x: Tensor, jsd: bool) -> bool:
    """Whether the C kernels cover this case and can be built."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not jsd and load(SOURCE) is not None


def normalise_teacher(logits: Tensor, out: Tensor, lognorm: Tensor | None, softcap: float | None, log_teacher: bool) -> tuple[Tensor, Tensor]:
    """See `rowwise.normalise_teacher`; overwrites `logits` where there is a cap."""
    n, v = _shape(logits, out)
    mass, top = logits.new_empty(n), logits.new_empty(n)
    norm = None if lognorm is None else lognorm.contiguous()
    _library().normalise_teacher(
        _at(logits),
        _at(out),
        None if norm is None else _at(norm),
        _float(softcap or 0),
        int(log_teacher),
        _long(n),
        _long(v),
        _at(mass),
        _at(top),
        torch.get_num_threads(),
    )
    return mass, top


def normalise_draft(x: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """See `rowwise.normalise_draft`."""
    n, v = _shape(x)
    norm, top = x.new_empty(n), x.new_empty(n)
    _library().normalise_draft(_at(x), _float(softcap or 0), _long(n), _long(v), _at(norm), _at(top), torch.get_num_threads())
    return norm, top


def finish(rows: tuple[Tensor, ...], teacher: Tensor, mix: Tensor, softcap: float | None, log_teacher: bool, gradient: bool) -> tuple[Tensor, ...]:
    """See `rowwise.finish`; `rows` are its arguments x to weight. Returns tv, agree, kl, reverse_kl."""
    x = rows[0]
    n, v = _shape(x, teacher)
    tv, kl, reverse_kl = (x.new_empty(n) for _ in range(3))
    agree = torch.empty(n, dtype=torch.bool)
    inputs = [t.contiguous() for t in (*rows[1:], teacher, mix)]
    _library().finish(
        _at(x),
        *(_at(t) for t in inputs),
        _float(softcap or 0),
        int(log_teacher),
        int(gradient),
        _long(n),
        _long(v),
        _at(tv),
        _at(agree),
        _at(kl),
        _at(reverse_kl),
        torch.get_num_threads(),
    )
    return tv, agree, kl, reverse_kl


_long, _float = ctypes.c_long, ctypes.c_float


def _library() -> ctypes.CDLL:
    library = load(SOURCE)
    assert library is not None, "callers ask usable() first"
    return library


def _at(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _shape(*tensors: Tensor) -> tuple[int, int]:
    """Rows of the first and the common width, after the checks that C cannot make."""
    assert all(t.is_contiguous() and t.dtype == torch.float32 and t.shape[1] == tensors[0].shape[1] for t in tensors)
    return tensors[0].shape[0], tensors[0].shape[1]
