// Kernels that are borrowed from the CPU: phi's own, queued on the stream of the pretend accelerator.
//
// In float32 they work where the tensors lie. The CPU has hardly any of 16 bits: for those, what goes in is
// lifted to float32, and what comes out is rounded, as by a device that adds up in float32. What is neither
// here nor in kernels.cc falls back to the CPU with copies that wait, which a step of training would hide in.
#include <memory>
#include <tuple>
#include <vector>

#include "device.h"
#include "paddle/phi/backends/all_context.h"
#include "paddle/phi/backends/context_pool.h"
#include "paddle/phi/core/kernel_registry.h"
#include "paddle/phi/kernels/activation_grad_kernel.h"
#include "paddle/phi/kernels/activation_kernel.h"
#include "paddle/phi/kernels/adam_kernel.h"
#include "paddle/phi/kernels/adamw_kernel.h"
#include "paddle/phi/kernels/add_n_kernel.h"
#include "paddle/phi/kernels/amp_kernel.h"
#include "paddle/phi/kernels/assign_kernel.h"
#include "paddle/phi/kernels/batch_norm_grad_kernel.h"
#include "paddle/phi/kernels/batch_norm_kernel.h"
#include "paddle/phi/kernels/bitwise_kernel.h"
#include "paddle/phi/kernels/cast_kernel.h"
#include "paddle/phi/kernels/clip_kernel.h"
#include "paddle/phi/kernels/compare_kernel.h"
#include "paddle/phi/kernels/cross_entropy_grad_kernel.h"
#include "paddle/phi/kernels/cross_entropy_kernel.h"
#include "paddle/phi/kernels/elementwise_add_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_divide_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_grad_kernel.h"
#include "paddle/phi/kernels/elementwise_multiply_kernel.h"
#include "paddle/phi/kernels/elementwise_subtract_kernel.h"
#include "paddle/phi/kernels/isfinite_kernel.h"
#include "paddle/phi/kernels/matmul_grad_kernel.h"
#include "paddle/phi/kernels/matmul_kernel.h"
#include "paddle/phi/kernels/mean_all_grad_kernel.h"
#include "paddle/phi/kernels/mean_all_kernel.h"
#include "paddle/phi/kernels/momentum_kernel.h"
#include "paddle/phi/kernels/reduce_sum_kernel.h"
#include "paddle/phi/kernels/scale_kernel.h"
#include "paddle/phi/kernels/sgd_kernel.h"
#include "paddle/phi/kernels/squared_l2_norm_kernel.h"

namespace pretend {

using phi::CPUContext;
using phi::DataType;
using phi::DenseTensor;
using phi::dtype::bfloat16;
using phi::dtype::float16;

inline const CPUContext& cpu() {
  auto& pool = phi::DeviceContextPool::Instance();
  return *static_cast<const CPUContext*>(pool.Get(phi::CPUPlace()));
}

inline bool is_half(const DenseTensor& x) {
  return x.initialized() && (x.dtype() == DataType::FLOAT16 || x.dtype() == DataType::BFLOAT16);
}

inline void cast(const DenseTensor& x, DataType type, DenseTensor* out) {
  if (x.dtype() == DataType::FLOAT16) return phi::CastKernel<float16>(cpu(), x, type, out);
  if (x.dtype() == DataType::BFLOAT16) return phi::CastKernel<bfloat16>(cpu(), x, type, out);
  phi::CastKernel<float>(cpu(), x, type, out);
}

// The same tensor at another address. It owns nothing: no device keeps the memory of what is queued.
inline DenseTensor at(const void* data, const DenseTensor& x) {
  auto meta = x.meta();
  size_t size = x.Holder()->size() - meta.offset;
  meta.offset = 0;
  return {std::make_shared<phi::Allocation>(const_cast<void*>(data), size, phi::CPUPlace()), meta};
}

// An argument of a kernel: taken when that is queued; lifted, given and rounded when it runs.
template <typename Given>
struct Argument {  // a number, a list, a text
  std::decay_t<Given> value;

  template <typename Context>
  Argument(const Context&, Given given) : value(given) {}
  void lift() {}
  Given get() { return value; }
  void round() {}
};

template <>
struct Argument<const DenseTensor&> {
  DenseTensor device, host;

  template <typename Context>
  Argument(const Context&, const DenseTensor& given) : device(given) {
    if (!given.initialized()) return;
    // paddle/phi/api/lib/data_transform.cc, PrepareData, has made it so.
    PADDLE_ENFORCE_EQ(given.meta().is_contiguous(), true, "A borrowed kernel got strides.");
    device = at(given.data(), given);
  }
  void lift() {
    if (device.initialized()) device = at(address(device.data()), device);
    host = device;
    if (!is_half(device)) return;
    host = DenseTensor();
    host.Resize(device.dims());
    cast(device, DataType::FLOAT32, &host);
  }
  const DenseTensor& get() { return host; }
  void round() {}
};

template <>
struct Argument<DenseTensor*> : Argument<const DenseTensor&> {
  bool is_asked;

  template <typename Context>
  Argument(const Context& context, DenseTensor* given)
      : Argument<const DenseTensor&>(context, allocated(context, given)), is_asked(given) {}
  DenseTensor* get() { return is_asked ? &host : nullptr; }
  void round() {
    if (is_half(device)) return cast(host, device.dtype(), &device);
    if (is_asked && device.numel() > 0 && host.data() != device.data()) abort();  // it was of another type
  }

 private:
  template <typename Context>
  static DenseTensor allocated(const Context& context, DenseTensor* out) {
    if (!out) return {};
    if (out->numel() >= 0) context.Alloc(out, out->dtype());  // less: batch_norm's, for cuDNN alone
    return *out;
  }
};

template <>
struct Argument<const paddle::optional<DenseTensor>&> {
  paddle::optional<Argument<const DenseTensor&>> tensor;
  paddle::optional<DenseTensor> value;

  template <typename Context>
  Argument(const Context& context, const paddle::optional<DenseTensor>& given) {
    if (given) tensor = Argument<const DenseTensor&>(context, *given);
  }
  void lift() {
    if (!tensor) return;
    tensor->lift();
    value = tensor->host;
  }
  const paddle::optional<DenseTensor>& get() { return value; }
  void round() {}
};

template <typename Each, typename Pointer>
struct Several {
  std::vector<Argument<Each>> all;
  std::vector<Pointer> pointers;

  template <typename Context>
  Several(const Context& context, const std::vector<Pointer>& given) {
    for (auto pointer : given) {
      if constexpr (std::is_pointer_v<Each>) all.emplace_back(context, pointer);
      if constexpr (std::is_reference_v<Each>) all.emplace_back(context, static_cast<Each>(*pointer));
    }
  }
  void lift() {
    for (auto& each : all) {
      each.lift();
      pointers.push_back(&each.host);
    }
  }
  const std::vector<Pointer>& get() { return pointers; }
  void round() {
    for (auto& each : all) each.round();
  }
};

template <>
struct Argument<const std::vector<const DenseTensor*>&> : Several<const DenseTensor&, const DenseTensor*> {
  using Several::Several;
};

template <>
struct Argument<const std::vector<const phi::TensorBase*>&> : Several<const DenseTensor&, const phi::TensorBase*> {
  using Several::Several;
};

template <>
struct Argument<std::vector<DenseTensor*>> : Several<DenseTensor*, DenseTensor*> {
  using Several::Several;
};

// A kernel of phi's, whose function of T is Kernel::of<T>.
template <typename Kernel, typename Function = decltype(Kernel::template of<float>)>
struct Borrowed;

template <typename Kernel, typename... Given>
struct Borrowed<Kernel, void (*const)(const CPUContext&, Given...)> {
  template <typename T, typename Context>
  static void Queue(const Context& context, Given... given) {
    auto arguments = std::make_shared<Arguments>(Argument<Given>(context, given)...);
    run(context.stream(), [arguments] {
      std::apply([](auto&... each) { (each.lift(), ...); }, *arguments);
      if constexpr (Kernel::kMaster) step_master(*arguments);
      std::apply([](auto&... each) { Kernel::template of<Lifted<T>>(cpu(), each.get()...); }, *arguments);
      std::apply([](auto&... each) { (each.round(), ...); }, *arguments);
    });
  }

 private:
  using Arguments = std::tuple<Argument<Given>...>;
  template <typename T>
  using Lifted = std::conditional_t<std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>, float, T>;
  static constexpr int kOutputs = (std::is_same_v<Given, DenseTensor*> + ...);

  // If an optimizer has master weights, those are stepped, in place, and the weights are their rounding.
  static void step_master(Arguments& arguments) {
    auto& master = std::get<Kernel::kMaster>(arguments).value;
    if (!master) return;
    std::get<0>(arguments).host = *master;
    std::get<sizeof...(Given) - kOutputs>(arguments).host = std::get<sizeof...(Given) - 1>(arguments).host;
  }
};

// It is of no type in phi.
template <typename T, typename Context>
void Assign(const Context& context, const DenseTensor& x, DenseTensor* out) {
  phi::AssignKernel(context, x, out);
}

}  // namespace pretend

// The macro of paddle pastes the device's name, so that one has to be replaced before.
#define REGISTER(...) PD_REGISTER_PLUGIN_KERNEL(__VA_ARGS__)
#define OF_PHI(name, function, master, ...)                        \
  struct name##_of_phi {                                           \
    static constexpr int kMaster = master;                         \
    template <typename T>                                          \
    static constexpr auto of = &function<T, phi::CPUContext>;      \
  };                                                               \
  REGISTER(name, PRETEND, ALL_LAYOUT, pretend::Borrowed<name##_of_phi>::Queue, __VA_ARGS__)
#define BORROW(name, function, ...) \
  OF_PHI(name, function, 0, __VA_ARGS__) {}
// Of an optimizer: which argument is the rate, that stays of 32 bits, and which are the master weights.
#define BORROW_OPTIMIZER(name, function, rate, master, ...) \
  OF_PHI(name, function, master, __VA_ARGS__) { kernel->InputAt(rate).SetDataType(phi::DataType::FLOAT32); }
#define FLOATS float, phi::dtype::float16, phi::dtype::bfloat16

BORROW(add_grad, phi::AddGradKernel, FLOATS)
BORROW(add_n, phi::AddNKernel, FLOATS)
BORROW(assign, pretend::Assign, bool, int, int64_t, double, FLOATS)
BORROW(batch_norm, phi::BatchNormKernel, FLOATS)
BORROW(batch_norm_grad, phi::BatchNormGradKernel, FLOATS)
BORROW(bitwise_or, phi::BitwiseOrKernel, bool)
BORROW(cast, phi::CastKernel, bool, int, int64_t, FLOATS)
BORROW(check_finite_and_unscale, phi::CheckFiniteAndUnscaleKernel, FLOATS)
BORROW(clip, phi::ClipKernel, FLOATS)
BORROW(cross_entropy_with_softmax, phi::CrossEntropyWithSoftmaxKernel, FLOATS)
BORROW(cross_entropy_with_softmax_grad, phi::CrossEntropyWithSoftmaxGradKernel, FLOATS)
BORROW(divide, phi::DivideKernel, FLOATS)
BORROW(isfinite, phi::IsfiniteKernel, FLOATS)
BORROW(matmul, phi::MatmulKernel, FLOATS)
BORROW(matmul_grad, phi::MatmulGradKernel, FLOATS)
BORROW(mean_all, phi::MeanAllKernel, FLOATS)
BORROW(mean_all_grad, phi::MeanAllGradKernel, FLOATS)
BORROW(multiply, phi::MultiplyKernel, int64_t, FLOATS)
BORROW(multiply_grad, phi::MultiplyGradKernel, FLOATS)
BORROW(not_equal, phi::NotEqualKernel, int64_t)
BORROW(relu, phi::ReluKernel, FLOATS)
BORROW(relu_grad, phi::ReluGradKernel, FLOATS)
BORROW(scale, phi::ScaleKernel, FLOATS)
BORROW(sqrt, phi::SqrtKernel, FLOATS)
BORROW(square, phi::SquareKernel, FLOATS)
BORROW(squared_l2_norm, phi::SquaredL2NormKernel, FLOATS)
BORROW(subtract, phi::SubtractKernel, FLOATS)
BORROW(sum, phi::SumKernel, FLOATS)
BORROW(tanh, phi::TanhKernel, FLOATS)
BORROW(tanh_grad, phi::TanhGradKernel, FLOATS)
BORROW_OPTIMIZER(adam, phi::AdamDenseKernel, 2, 8, FLOATS)
BORROW_OPTIMIZER(adamw, phi::AdamwDenseKernel, 2, 8, FLOATS)
BORROW_OPTIMIZER(momentum, phi::MomentumDenseKernel, 3, 4, FLOATS)
BORROW_OPTIMIZER(sgd, phi::SGDDenseKernel, 1, 3, FLOATS)
