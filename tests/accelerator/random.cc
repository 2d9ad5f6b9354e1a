// The kernels that draw from the device's generator, as paddle's kernels do on a GPU: each takes a part of the numbers
// of the generator's seed and moves its offset on (paddle/phi/core/generator.h, IncrementOffset), and the number of an
// element depends on seed, offset and place alone.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "device.h"
#include "paddle/phi/backends/all_context.h"
#include "paddle/phi/common/int_array.h"
#include "paddle/phi/common/scalar.h"
#include "paddle/phi/core/generator.h"
#include "paddle/phi/core/kernel_registry.h"

namespace pretend {

using phi::DenseTensor;

// The random numbers of one kernel, in [0, 1).
class Draws {
 public:
  // A `seed` other than 0 is the caller's own: the generator stays where it is.
  template <typename Context>
  Draws(const Context& context, int64_t count, int64_t seed = 0) : seed_(seed) {
    const uint64_t fours = (count + 3) / 4 * 4;  // a thread of a GPU draws four at a time
    if (!seed) std::tie(seed_, first_) = context.GetGenerator()->IncrementOffset(fours);
  }

  double operator[](uint64_t place) const { return (mixed(mixed(seed_) + first_ + place) >> 11) * 0x1p-53; }

 private:
  // SplitMix64's (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
  static uint64_t mixed(uint64_t bits) {
    bits += 0x9e3779b97f4a7c15;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
    return bits ^ (bits >> 31);
  }

  uint64_t seed_, first_ = 0;
};

// Queues a kernel that computes each of `count` elements from its place.
template <typename T, typename Context, typename Element>
void fill(const Context& context, DenseTensor* out, Element element) {
  T* data = context.template Alloc<T>(out);
  run(context.stream(), [=, size = out->numel()] {
    for (int64_t i = 0; i < size; i++) real(data)[i] = static_cast<T>(element(i));
  });
}

inline int64_t resized(DenseTensor* out, const phi::IntArray& shape) {
  out->Resize(common::make_ddim(shape.GetData()));
  return out->numel();
}

template <typename T, typename Context>
void Uniform(const Context& context, const phi::IntArray& shape, phi::DataType, const phi::Scalar& min, const phi::Scalar& max, int seed, DenseTensor* out) {
  Draws draws(context, resized(out, shape), seed);
  const double low = min.to<double>(), width = max.to<double>() - low;
  fill<T>(context, out, [=](int64_t i) { return low + width * draws[i]; });
}

template <typename T, typename Context>
void Gaussian(const Context& context, const phi::IntArray& shape, float mean, float deviation, int seed, phi::DataType, DenseTensor* out) {
  Draws draws(context, 2 * resized(out, shape), seed);
  fill<T>(context, out, [=](int64_t i) {
    const double radius = std::sqrt(-2 * std::log(1 - draws[2 * i]));
    return mean + deviation * radius * std::cos(2 * M_PI * draws[2 * i + 1]);
  });
}

template <typename T, typename Context>
void Randint(const Context& context, int low, int high, const phi::IntArray& shape, phi::DataType, DenseTensor* out) {
  Draws draws(context, resized(out, shape));
  fill<T>(context, out, [=](int64_t i) { return low + std::floor((static_cast<double>(high) - low) * draws[i]); });
}

template <typename T, typename Context>
void Randperm(const Context& context, int count, phi::DataType, DenseTensor* out) {
  Draws draws(context, count);
  T* data = context.template Alloc<T>(out);
  run(context.stream(), [=] {
    T* order = real(data);
    std::iota(order, order + count, T(0));
    std::sort(order, order + count, [&](T one, T two) { return draws[one] < draws[two]; });
  });
}

template <typename T, typename Context>
void Bernoulli(const Context& context, const DenseTensor& x, DenseTensor* out) {
  Draws draws(context, x.numel());
  fill<T>(context, out, [=, chance = x.data<T>()](int64_t i) { return draws[i] < static_cast<double>(real(chance)[i]); });
}

template <typename T, typename Context>
void Dropout(const Context& context, const DenseTensor& x, const paddle::optional<DenseTensor>&, const phi::Scalar& chance, bool is_test, const std::string& mode, int seed, bool fix_seed, DenseTensor* out, DenseTensor* mask) {
  const float kept = 1 - chance.to<float>();
  const bool scales_now = mode == "upscale_in_train";
  const T* data = x.data<T>();
  if (is_test) return fill<T>(context, out, [=](int64_t i) { return static_cast<float>(real(data)[i]) * (scales_now ? 1 : kept); });
  Draws draws(context, x.numel(), fix_seed ? seed : 0);
  fill<uint8_t>(context, mask, [=](int64_t i) { return draws[i] < kept; });
  fill<T>(context, out, [=](int64_t i) { return draws[i] < kept ? static_cast<float>(real(data)[i]) / (scales_now ? kept : 1) : 0; });
}

template <typename T, typename Context>
void DropoutGrad(const Context& context, const DenseTensor& mask, const DenseTensor& out_grad, const phi::Scalar& chance, bool is_test, const std::string& mode, DenseTensor* x_grad) {
  const float kept = 1 - chance.to<float>();
  const bool scales_now = mode == "upscale_in_train";
  const T* data = out_grad.data<T>();
  if (is_test) return fill<T>(context, x_grad, [=](int64_t i) { return static_cast<float>(real(data)[i]) * (scales_now ? 1 : kept); });
  fill<T>(context, x_grad, [=, is_kept = mask.data<uint8_t>()](int64_t i) {
    return real(is_kept)[i] ? static_cast<float>(real(data)[i]) / (scales_now ? kept : 1) : 0;
  });
}

}  // namespace pretend

#define FLOATS float, double, phi::dtype::float16, phi::dtype::bfloat16

KERNEL(uniform, PRETEND, pretend::Uniform, FLOATS)
KERNEL(gaussian, PRETEND, pretend::Gaussian, FLOATS)
KERNEL(randint, PRETEND, pretend::Randint, int, int64_t)
KERNEL(randperm, PRETEND, pretend::Randperm, float, double, int, int64_t)
KERNEL(bernoulli, PRETEND, pretend::Bernoulli, float, double)
KERNEL(dropout, PRETEND, pretend::Dropout, FLOATS)
KERNEL(dropout_grad, PRETEND, pretend::DropoutGrad, FLOATS)
