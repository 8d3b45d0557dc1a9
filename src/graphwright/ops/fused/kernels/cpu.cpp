// The operators on the CPU in float32: a pass over memory where PyTorch's operations take two to
// four. A row stays in the cache between its passes. All that these loops do not take is left to
// the operations of the reference.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>

namespace {

using Vec = at::vec::Vectorized<float>;
using Row = std::optional<at::Tensor>;

// Elements for which a thread is worth its start.
constexpr int64_t GRAIN = 16384;

int64_t rows_at_once(int64_t columns) {
  return std::max<int64_t>(1, GRAIN / columns);
}

// The elements from row to row where one number tells, else -1.
int64_t row_stride(const at::Tensor& x) {
  const int64_t columns = x.size(-1);
  if (x.is_contiguous()) return columns;
  if (columns > 1 && x.stride(-1) != 1) return -1;
  int64_t found = -1, following = 0;
  for (int64_t d = x.dim() - 2; d >= 0; --d) {
    if (x.size(d) == 1) continue;
    if (found < 0) {
      found = x.stride(d);
    } else if (x.stride(d) != following) {
      return -1;
    }
    following = x.stride(d) * x.size(d);
  }
  if (found < 0) return columns;
  return found == 0 || found >= columns ? found : -1;
}

bool takes(const at::Tensor& x) {
  return x.scalar_type() == at::kFloat && x.device().is_cpu() && x.dim() > 0 && x.numel() > 0 &&
      !x.is_neg();
}

bool takes_both(const at::Tensor& x, const at::Tensor& other) {
  return takes(x) && takes(other) && x.sizes() == other.sizes() && row_stride(x) >= 0 &&
      row_stride(other) >= 0;
}

bool takes_row(const Row& row, int64_t columns) {
  return !row.has_value() ||
      (takes(*row) && row->dim() == 1 && row->size(0) == columns && row->is_contiguous());
}

const float* data_or_null(const Row& row) {
  return row.has_value() ? row->const_data_ptr<float>() : nullptr;
}

// Whole vectors first, then what is left of the row.
template <typename Body>
inline void for_vectors(int64_t columns, const Body& body) {
  int64_t i = 0;
  for (; i + Vec::size() <= columns; i += Vec::size()) body(i, Vec::size());
  if (i < columns) body(i, columns - i);
}

inline float sum_of(const Vec& v) {
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, v);
}

// Lanes beyond the row's end hold no value of it.
inline Vec only(const Vec& v, int64_t count) {
  return Vec::set(Vec(0.f), v, count);
}

inline Vec silu(const Vec& v) {
  return v / (Vec(1.f) + v.neg().exp());
}

// The sum of a row and the residual, with its norm, centred or not.
template <bool CENTRED>
void add_norm_row(
    const float* x, const float* residual, const float* weight, const float* bias,
    float* normalized, float* total, int64_t columns, float eps) {
  Vec sum(0.f);
  for_vectors(columns, [&](int64_t i, int64_t n) {
    const Vec v = Vec::loadu(x + i, n) + Vec::loadu(residual + i, n);
    v.store(total + i, n);
    sum = sum + only(CENTRED ? v : v * v, n);
  });
  float mean = 0.f, square = sum_of(sum) / columns;
  if (CENTRED) {
    mean = square;
    sum = Vec(0.f);
    for_vectors(columns, [&](int64_t i, int64_t n) {
      const Vec v = Vec::loadu(total + i, n) - Vec(mean);
      sum = sum + only(v * v, n);
    });
    square = sum_of(sum) / columns;
  }
  const Vec scale(1.f / std::sqrt(square + eps)), middle(mean);
  for_vectors(columns, [&](int64_t i, int64_t n) {
    Vec v = (Vec::loadu(total + i, n) - middle) * scale;
    if (weight) v = v * Vec::loadu(weight + i, n);
    if (bias) v = v + Vec::loadu(bias + i, n);
    v.store(normalized + i, n);
  });
}

template <bool CENTRED>
std::tuple<at::Tensor, at::Tensor> add_norm(
    const at::Tensor& x, const at::Tensor& residual, const Row& weight, const Row& bias,
    double eps) {
  const int64_t columns = x.size(-1), rows = x.numel() / columns;
  at::Tensor total = at::empty(x.sizes(), x.options()), normalized = at::empty_like(total);
  const float *a = x.const_data_ptr<float>(), *b = residual.const_data_ptr<float>();
  const float *scale = data_or_null(weight), *shift = data_or_null(bias);
  float *out = normalized.mutable_data_ptr<float>(), *sum = total.mutable_data_ptr<float>();
  const int64_t a_stride = row_stride(x), b_stride = row_stride(residual);
  at::parallel_for(0, rows, rows_at_once(columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      add_norm_row<CENTRED>(
          a + r * a_stride, b + r * b_stride, scale, shift, out + r * columns, sum + r * columns,
          columns, static_cast<float>(eps));
    }
  });
  return {normalized, total};
}

constexpr float LEAST = -std::numeric_limits<float>::infinity();

// from * factor where the mask is true, else -inf. GCC makes vectors of the first loop as it is
// written, by bits and bytes, but not of a choice between floats by booleans.
void scale_where(
    const float* __restrict from, const bool* __restrict mask, int64_t step, float factor,
    float* __restrict to, int64_t columns) {
  if (step != 1) {
    for (int64_t c = 0; c < columns; ++c) to[c] = mask[c * step] ? from[c] * factor : LEAST;
    return;
  }
  const auto* bytes = reinterpret_cast<const uint8_t*>(mask);
  uint32_t none;
  std::memcpy(&none, &LEAST, sizeof none);
  for (int64_t c = 0; c < columns; ++c) {
    const float value = from[c] * factor;
    const uint32_t keep = bytes[c] != 0 ? ~0u : 0u;
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = (bits & keep) | (none & ~keep);
    std::memcpy(to + c, &bits, sizeof bits);
  }
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> add_layer_norm(
    const at::Tensor& x, const at::Tensor& residual, const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias, double eps) {
  if (takes_both(x, residual) && takes_row(weight, x.size(-1)) && takes_row(bias, x.size(-1))) {
    return add_norm<true>(x, residual, weight, bias, eps);
  }
  at::Tensor total = x + residual;
  return {at::layer_norm(total, total.sizes().slice(total.dim() - 1), weight, bias, eps), total};
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(
    const at::Tensor& x, const at::Tensor& residual, const std::optional<at::Tensor>& weight,
    double eps) {
  if (takes_both(x, residual) && takes_row(weight, x.size(-1))) {
    return add_norm<false>(x, residual, weight, std::nullopt, eps);
  }
  at::Tensor total = x + residual;
  return {at::rms_norm(total, total.sizes().slice(total.dim() - 1), weight, eps), total};
}

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  if (!takes_both(gate, up)) return at::silu(gate) * up;
  const int64_t columns = gate.size(-1), rows = gate.numel() / columns;
  at::Tensor result = at::empty(gate.sizes(), gate.options());
  const float *a = gate.const_data_ptr<float>(), *b = up.const_data_ptr<float>();
  float* out = result.mutable_data_ptr<float>();
  const int64_t a_stride = row_stride(gate), b_stride = row_stride(up);
  const auto row = [](const float* x, const float* y, float* z, int64_t count) {
    for_vectors(count, [&](int64_t i, int64_t n) {
      (silu(Vec::loadu(x + i, n)) * Vec::loadu(y + i, n)).store(z + i, n);
    });
  };
  if (a_stride == columns && b_stride == columns) {
    at::parallel_for(0, gate.numel(), GRAIN, [&](int64_t begin, int64_t end) {
      row(a + begin, b + begin, out + begin, end - begin);
    });
    return result;
  }
  at::parallel_for(0, rows, rows_at_once(columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      row(a + r * a_stride, b + r * b_stride, out + r * columns, columns);
    }
  });
  return result;
}

at::Tensor masked_softmax(
    const at::Tensor& scores, const std::optional<at::Tensor>& mask, double scale) {
  const int64_t dims = scores.dim();
  bool taken = takes(scores) && dims <= 4 && (scores.size(-1) == 1 || scores.stride(-1) == 1);
  int64_t sizes[4] = {1, 1, 1, 1}, strides[4] = {0, 0, 0, 0}, steps[4] = {0, 0, 0, 0};
  for (int64_t d = 0; taken && d < dims; ++d) {
    sizes[4 - dims + d] = scores.size(d);
    strides[4 - dims + d] = scores.stride(d);
  }
  if (taken && mask.has_value()) {
    taken = mask->scalar_type() == at::kBool && mask->device().is_cpu() && mask->dim() <= dims;
    for (int64_t d = 0; taken && d < mask->dim(); ++d) {
      const int64_t at = 4 - mask->dim() + d;
      taken = mask->size(d) == 1 || mask->size(d) == sizes[at];
      steps[at] = mask->size(d) == 1 ? 0 : mask->stride(d);
    }
  }
  if (!taken) {
    at::Tensor scaled = scores * scale;
    if (mask.has_value()) {
      TORCH_CHECK_TYPE(
          at::isIntegralType(mask->scalar_type(), /*includeBool=*/true),
          "~ (operator.invert) is only implemented on integer and Boolean-type tensors");
      scaled = scaled.masked_fill(
          mask->bitwise_not(), -std::numeric_limits<double>::infinity());
    }
    return scaled.softmax(-1);
  }
  const int64_t columns = sizes[3], rows = scores.numel() / columns;
  at::Tensor result = at::empty(scores.sizes(), scores.options());
  const float* in = scores.const_data_ptr<float>();
  const bool* attend = mask.has_value() ? mask->const_data_ptr<bool>() : nullptr;
  float* out = result.mutable_data_ptr<float>();
  const float factor = static_cast<float>(scale);
  at::parallel_for(0, rows, rows_at_once(columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t i2 = r % sizes[2], i1 = r / sizes[2] % sizes[1], i0 = r / sizes[2] / sizes[1];
      const float* from = in + i0 * strides[0] + i1 * strides[1] + i2 * strides[2];
      float* to = out + r * columns;
      if (attend) {
        const bool* where = attend + i0 * steps[0] + i1 * steps[1] + i2 * steps[2];
        scale_where(from, where, steps[3], factor, to, columns);
      } else {
        for_vectors(columns, [&](int64_t i, int64_t n) {
          (Vec::loadu(from + i, n) * Vec(factor)).store(to + i, n);
        });
      }
      Vec largest(LEAST);
      for_vectors(columns, [&](int64_t i, int64_t n) {
        largest = at::vec::maximum(largest, Vec::set(Vec(LEAST), Vec::loadu(to + i, n), n));
      });
      const Vec peak(at::vec::vec_reduce_all<float>(
          [](Vec a, Vec b) { return at::vec::maximum(a, b); }, largest));
      Vec sum(0.f);
      for_vectors(columns, [&](int64_t i, int64_t n) {
        const Vec v = (Vec::loadu(to + i, n) - peak).exp();
        v.store(to + i, n);
        sum = sum + only(v, n);
      });
      const Vec inverse(1.f / sum_of(sum));
      for_vectors(columns, [&](int64_t i, int64_t n) {
        (Vec::loadu(to + i, n) * inverse).store(to + i, n);
      });
    }
  });
  return result;
}
