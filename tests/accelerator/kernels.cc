// The kernels that paddle fetches by name, on the pretend accelerator: full, fill, contiguous, strided_copy,
// add and stack. What it lacks falls back to the CPU's, with copies (FLAGS_enable_api_kernel_fallback).
#include <algorithm>
#include <memory>
#include <vector>

#include "device.h"
#include "paddle/phi/backends/all_context.h"
#include "paddle/phi/common/int_array.h"
#include "paddle/phi/common/scalar.h"
#include "paddle/phi/core/kernel_registry.h"

namespace pretend {

using Numbers = std::vector<int64_t>;  // an axis each
using phi::DenseTensor;

inline Numbers numbers(const common::DDim& dims) { return common::vectorize<int64_t>(dims); }

// The strides of a tensor without gaps, in elements.
inline Numbers dense(const Numbers& shape) {
  Numbers strides(shape.size());
  int64_t next = 1;
  for (size_t axis = shape.size(); axis-- > 0; next *= shape[axis]) strides[axis] = next;
  return strides;
}

inline int64_t volume(const Numbers& shape) {
  int64_t product = 1;
  for (auto length : shape) product *= length;
  return product;
}

// Where the element `index`, counted in C order, lies.
inline int64_t place(int64_t index, const Numbers& shape, const Numbers& strides) {
  int64_t found = 0;
  for (size_t axis = shape.size(); axis-- > 0; index /= shape[axis])
    found += index % shape[axis] * strides[axis];
  return found;
}

template <typename T>
std::unique_ptr<T[]> gathered(const T* data, const Numbers& shape, const Numbers& strides) {
  int64_t size = volume(shape);
  std::unique_ptr<T[]> found(new T[size]);
  for (int64_t i = 0; i < size; i++) found[i] = data[place(i, shape, strides)];
  return found;
}

template <typename T, typename Half>
std::unique_ptr<T[]> lifted(const void* data, const Numbers& shape, const Numbers& strides) {
  auto halves = gathered(static_cast<const Half*>(data), shape, strides);
  std::unique_ptr<T[]> found(new T[volume(shape)]);
  std::transform(halves.get(), halves.get() + volume(shape), found.get(), [](Half half) { return T(float(half)); });
  return found;
}

// The elements as T. Paddle adds a gradient of 16 bits to one of float32, with amp's master_grad.
template <typename T>
std::unique_ptr<T[]> gathered_as(const void* pointer, phi::DataType type, const Numbers& shape, const Numbers& strides) {
  const void* data = address(pointer);
  if (type == phi::DataType::FLOAT16) return lifted<T, phi::dtype::float16>(data, shape, strides);
  if (type == phi::DataType::BFLOAT16) return lifted<T, phi::dtype::bfloat16>(data, shape, strides);
  return gathered(static_cast<const T*>(data), shape, strides);
}

// Where the elements lie; an error if they are neither of 16 bits nor T.
template <typename T>
const void* data_of(const DenseTensor& x) {
  bool is_half = x.dtype() == phi::DataType::FLOAT16 || x.dtype() == phi::DataType::BFLOAT16;
  return is_half ? x.data() : x.data<T>();
}

template <typename T>
void scatter(const T* data, T* target, const Numbers& shape, const Numbers& strides) {
  for (int64_t i = volume(shape); i-- > 0;) target[place(i, shape, strides)] = data[i];
}

template <typename T, typename Context>
void Full(
    const Context& context, const phi::IntArray& shape, const phi::Scalar& value, phi::DataType,
    DenseTensor* out) {
  out->Resize(common::make_ddim(shape.GetData()));
  T* data = context.template Alloc<T>(out);
  run(context.stream(), [=, size = out->numel(), number = value.to<T>()] {
    if (size) std::fill_n(real(data), size, number);
  });
}

template <typename T, typename Context>
void Fill(const Context& context, const DenseTensor&, const phi::Scalar& value, DenseTensor* out) {
  T* data = context.template Alloc<T>(out);
  auto shape = numbers(out->dims()), strides = numbers(out->strides());
  run(context.stream(), [=, number = value.to<T>()] {
    for (int64_t i = volume(shape); i-- > 0;) real(data)[place(i, shape, strides)] = number;
  });
}

template <typename T, typename Context>
void Contiguous(const Context& context, const DenseTensor& x, DenseTensor* out) {
  auto meta = x.meta();
  meta.strides = meta.calc_strides(meta.dims);
  meta.offset = 0;
  out->set_meta(meta);
  T* data = context.template Alloc<T>(out);
  if (!x.numel()) return;
  run(context.stream(), [=, from = x.data<T>(), shape = numbers(x.dims()), strides = numbers(x.strides())] {
    auto found = gathered(real(from), shape, strides);
    std::copy_n(found.get(), volume(shape), real(data));
  });
}

template <typename T, typename Context>
void StridedCopy(
    const Context& context, const DenseTensor& x, const Numbers& shape, const Numbers& strides,
    int64_t offset, DenseTensor* out) {
  auto meta = out->meta();
  meta.dims = common::make_ddim(shape);
  meta.strides = common::make_ddim(strides);
  meta.offset = offset;
  out->set_meta(meta);
  if (!x.numel()) return;
  T* data = out->data<T>();
  run(context.stream(), [=, from = x.data<T>(), own = numbers(x.dims()), steps = numbers(x.strides())] {
    scatter<T>(gathered(real(from), own, steps).get(), real(data), shape, strides);
  });
}

// The strides of a tensor seen in a greater shape: an axis of one element stays where it is.
inline Numbers spread(const DenseTensor& x, const Numbers& shape) {
  auto own = numbers(x.dims()), strides = numbers(x.strides());
  Numbers found(shape.size() - own.size(), 0);
  for (size_t axis = 0; axis < own.size(); axis++) found.push_back(own[axis] == 1 ? 0 : strides[axis]);
  return found;
}

template <typename T, typename Context>
void Add(const Context& context, const DenseTensor& x, const DenseTensor& y, DenseTensor* out) {
  auto shape = numbers(x.dims()), other = numbers(y.dims());
  if (shape.size() < other.size()) std::swap(shape, other);
  for (size_t axis = shape.size(), back = other.size(); back-- > 0;)
    if (shape[--axis] == 1) shape[axis] = other[back];
  auto steps = spread(x, shape), others = spread(y, shape);
  const void *a = x.numel() ? data_of<T>(x) : nullptr, *b = y.numel() ? data_of<T>(y) : nullptr;
  out->Resize(common::make_ddim(shape));
  T* data = context.template Alloc<T>(out);
  run(context.stream(), [=, type = x.dtype(), other = y.dtype()] {
    if (!volume(shape)) return;
    auto one = gathered_as<T>(a, type, shape, steps), two = gathered_as<T>(b, other, shape, others);
    for (int64_t i = volume(shape); i-- > 0;) real(data)[i] = one[i] + two[i];
  });
}

// Along the first axis alone: what is logged is read so, by one copy.
template <typename T, typename Context>
void Stack(const Context& context, const std::vector<const DenseTensor*>& x, int axis, DenseTensor* out) {
  PADDLE_ENFORCE_EQ(axis, 0, phi::errors::Unimplemented("the pretend accelerator stacks along axis 0"));
  T* data = context.template Alloc<T>(out);
  std::vector<const T*> parts;
  for (auto part : x) parts.push_back(part->template data<T>());
  run(context.stream(), [=, size = x[0]->numel()] {
    for (size_t i = 0; i < parts.size(); i++) std::copy_n(real(parts[i]), size, real(data) + i * size);
  });
}

}  // namespace pretend

#define NUMBERS float, double, int, int64_t, phi::dtype::float16, phi::dtype::bfloat16
#define ALL_TYPES NUMBERS, int16_t, int8_t, uint8_t, bool

KERNEL(full, PRETEND, pretend::Full, ALL_TYPES)
KERNEL(fill, PRETEND, pretend::Fill, ALL_TYPES)
KERNEL(contiguous, PRETEND, pretend::Contiguous, ALL_TYPES)
KERNEL(strided_copy, PRETEND, pretend::StridedCopy, ALL_TYPES)
KERNEL(add, PRETEND, pretend::Add, NUMBERS)
KERNEL(stack, PRETEND, pretend::Stack, NUMBERS, bool)
