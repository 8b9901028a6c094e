// Two accelerators that are none, of torch's PrivateUse1 type. Their memory is the host's, but no
// code can read or write it unless it goes through the device: outside of an operator the pages
// are protected, and a touch kills the process. An operator is the host's own, run on tensors that
// lend it the device's memory.

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::Storage, c10::Stream;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
constexpr c10::DispatchKeySet kHostKeys(c10::DispatchKey::CPU);
constexpr DeviceIndex kNumDevices = 2;
size_t device_bytes = size_t{1} << 30;  // of each device, for this process

thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_streams[kNumDevices] = {};

Device resolved(DeviceIndex index) { return {kType, index < 0 ? current_device : index}; }

// --- memory --------------------------------------------------------------------------------------

struct Block {
  void* start;
  size_t num_bytes;
  DeviceIndex device;
  int num_users = 0;  // operators that run on it
};

std::mutex memory_mutex;
c10::CachingAllocator::Stat held[kNumDevices];

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  munmap(block->start, block->num_bytes);
  std::lock_guard<std::mutex> lock(memory_mutex);
  held[block->device].decrease(block->num_bytes);
  delete block;
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t wanted) override {
    const Device device(kType, current_device);
    if (wanted == 0) return {nullptr, device};
    const size_t page = getpagesize(), num_bytes = (wanted + page - 1) / page * page;
    std::lock_guard<std::mutex> lock(memory_mutex);
    auto& own = held[current_device];
    TORCH_CHECK_WITH(OutOfMemoryError, own.current + num_bytes <= device_bytes, device,
                     " is out of memory: ", wanted, " bytes wanted, ", own.current, " held.");
    void* start =
        mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, start != MAP_FAILED, "The host has no memory left.");
    std::memset(start, 0xFF, num_bytes);  // new memory holds no zeros, but NaN
    mprotect(start, num_bytes, PROT_NONE);
    own.increase(num_bytes);
    return {start, new Block{start, num_bytes, current_device}, &free_block, device};
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "An operator copies, not the allocator");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = stats.reserved_bytes[0] = held[device];
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(memory_mutex);
    held[device].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return {device_bytes - held[device].current, device_bytes};
  }
} memory;

Storage new_storage(size_t num_bytes, DeviceIndex device) {
  c10::DeviceGuard guard(Device(kType, device));
  return Storage(Storage::use_byte_size_t(), num_bytes, memory.allocate(num_bytes), &memory, true);
}

Tensor like(const Tensor& other, const Storage& storage, c10::DispatchKeySet keys) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), keys, other.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(other.sizes(), other.strides(), other.storage_offset());
  impl->_set_conj(other.is_conj());
  impl->_set_neg(other.is_neg());
  return made;
}

// What tensors of one device lend to the host while one operator runs.
class Loan {
 public:
  ~Loan() {
    for (auto& each : storages_) use(each.own, -1);
  }

  Storage host(const Storage& own) {
    for (auto& each : storages_)
      if (each.own.is_alias_of(own)) return each.lent;
    use(own, +1);
    auto* start = const_cast<void*>(own.data());
    Storage lent(Storage::use_byte_size_t(), own.nbytes(), c10::DataPtr(start, c10::kCPU),
                 c10::GetAllocator(c10::kCPU), true);
    storages_.push_back({own, lent});
    return lent;
  }

  Tensor host(const Tensor& tensor, bool may_be_elsewhere = false) {
    if (!tensor.defined()) return tensor;
    const bool is_own = tensor.device().type() == kType;
    if (!may_be_elsewhere && (is_own || tensor.dim() > 0)) {
      TORCH_CHECK(!found_ || *found_ == tensor.device(), "Expected all tensors to be on the same "
                  "device, but found ", *found_, " and ", tensor.device());
      found_ = tensor.device();
    }
    if (!is_own) return tensor;
    index_ = tensor.device().index();
    tensors_.emplace_back(tensor, like(tensor, host(tensor.storage()), kHostKeys));
    return tensors_.back().second;
  }

  // The device's tensor for one of the host: the same one, or a view of it, or else a copy.
  Tensor device(const Tensor& found) {
    if (!found.defined()) return found;
    for (auto& [own, lent] : tensors_)
      if (lent.is_same(found)) return own;
    for (auto& each : storages_)
      if (each.lent.is_alias_of(found.storage())) return like(found, each.own, kKeys);
    return like(found, copied(found.storage(), index_), kKeys);
  }

  // Arguments that the operator has given another size.
  void take_back() {
    for (auto& [own, lent] : tensors_) {
      auto* impl = own.unsafeGetTensorImpl();
      if (own.storage().data() != lent.storage().data())
        impl->set_storage_keep_dtype(copied(lent.storage(), own.device().index()));
      if (own.sizes() != lent.sizes() || own.strides() != lent.strides())
        impl->set_sizes_and_strides(lent.sizes(), lent.strides(), lent.storage_offset());
    }
  }

  DeviceIndex index() const { return index_; }

 private:
  struct Lent {
    Storage own, lent;
  };

  Storage copied(const Storage& from, DeviceIndex index) {
    const Storage own = new_storage(from.nbytes(), index);
    use(own, +1);
    std::memcpy(const_cast<void*>(own.data()), from.data(), from.nbytes());
    storages_.push_back({own, from});
    return own;
  }

  static void use(const Storage& own, int change) {
    auto* block = static_cast<Block*>(own.data_ptr().cast_context<Block>(&free_block));
    if (block == nullptr) return;
    std::lock_guard<std::mutex> lock(memory_mutex);
    const bool was_used = block->num_users > 0;
    block->num_users += change;
    if ((block->num_users > 0) != was_used)
      mprotect(block->start, block->num_bytes, was_used ? PROT_NONE : PROT_READ | PROT_WRITE);
  }

  std::vector<Lent> storages_;
  std::vector<std::pair<Tensor, Tensor>> tensors_;
  std::optional<Device> found_;
  DeviceIndex index_ = current_device;
};

// --- random numbers ------------------------------------------------------------------------------

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(DeviceIndex index)
      : DeviceGenerator(index, at::detail::createCPUGenerator()) {}
  DeviceGenerator(DeviceIndex index, at::Generator host)
      : GeneratorImpl(Device(kType, index), kKeys), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(device().index(), host.clone());
  }
  at::Generator host;
};

const at::Generator& default_generator(DeviceIndex index) {
  static const at::Generator generators[kNumDevices] = {at::make_generator<DeviceGenerator>(0),
                                                        at::make_generator<DeviceGenerator>(1)};
  return generators[resolved(index).index()];
}

// --- operators -----------------------------------------------------------------------------------

bool is_generator(const c10::Argument& argument) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  const auto type = optional ? optional->getElementType() : argument.type();
  return type->kind() == c10::TypeKind::GeneratorType;
}

void lend(Loan& loan, c10::IValue& value) {
  if (value.isTensor()) {
    value = loan.host(value.toTensor());
  } else if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& each : list) each = loan.host(each);
    value = list;
  } else if (value.isOptionalTensorList()) {  // indices, which may be the host's
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector())
      list.push_back(each ? std::optional(loan.host(*each, true)) : std::nullopt);
    value = list;
  } else if (value.isDevice()) {
    value = Device(c10::kCPU);
  }
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Loan loan;
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  for (size_t i = 0; i < count; ++i) lend(loan, (*stack)[first + i]);
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[first + i];
    if (!is_generator(schema.arguments()[i])) continue;
    const auto given = value.isNone() ? default_generator(loan.index()) : value.toGenerator();
    TORCH_CHECK(given.device().type() == kType, "Expected a generator of the device");
    value = given.get<DeviceGenerator>()->host;
  }
  op.redispatchBoxed(kHostKeys, stack);
  loan.take_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = loan.device(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& each : list) each = loan.device(each);
      value = list;
    }
  }
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(*device);
  return at::detail::empty_generic(size, &memory, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(*device);
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys,
                                           c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool) {
  Loan loan;
  loan.host(target, true).copy_(loan.host(self, true));
  return target;
}

void resize_bytes(const Storage& storage, size_t num_bytes) {
  const Storage grown = new_storage(num_bytes, storage.device().index());
  {
    Loan loan;
    std::memcpy(const_cast<void*>(loan.host(grown).data()), loan.host(storage).data(),
                std::min(num_bytes, storage.nbytes()));
  }
  auto* taken = grown.unsafeGetStorageImpl();
  storage.set_data_ptr_noswap(std::move(taken->_mutable_data_ptr_no_checks()));
  storage.set_nbytes(num_bytes);
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size,
                     std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  const size_t needed = at::detail::computeStorageNbytes(self.sizes(), self.strides(),
                                                         self.itemsize(), self.storage_offset());
  if (needed > self.storage().nbytes()) resize_bytes(self.storage(), needed);
  return self;
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                   bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  Loan loan;
  return loan.device(at::convolution(loan.host(input), loan.host(weight),
                                     bias ? std::optional(loan.host(*bias)) : std::nullopt, stride,
                                     padding, dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  Loan loan;
  const std::vector<int64_t> bias_size{grad.size(1)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      loan.host(grad), loan.host(input), loan.host(weight), bias_size, stride, padding, dilation,
      transposed, output_padding, groups, mask);
  return {loan.device(of_input), loan.device(of_weight), loan.device(of_bias)};
}

// The host's draws from the host's stream.
std::tuple<Tensor, Tensor> dropout(const Tensor& input, double p, std::optional<bool> train) {
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true)) return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// Cells of LSTMs and GRUs, which torch takes to be one kernel of any device.
Tensor biased(const Tensor& gates, const std::optional<Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden,
                                             const Tensor& state,
                                             const std::optional<Tensor>& input_bias,
                                             const std::optional<Tensor>& hidden_bias) {
  const Tensor gates = biased(input, input_bias) + biased(hidden, hidden_bias);
  const auto each = gates.chunk(4, 1);
  const Tensor next = each[1].sigmoid() * state + each[0].sigmoid() * each[2].tanh();
  return {each[3].sigmoid() * next.tanh(), next, gates};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& state,
                                    const std::optional<Tensor>& input_bias,
                                    const std::optional<Tensor>& hidden_bias) {
  const auto given = biased(input, input_bias).chunk(3, 1);
  const auto kept = biased(hidden, hidden_bias).chunk(3, 1);
  const Tensor fresh = (given[2] + (given[0] + kept[0]).sigmoid() * kept[2]).tanh();
  return {fresh + (given[1] + kept[1]).sigmoid() * (state - fresh), input};
}

void implement_cells(torch::Library& m) {
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // torch's own way to these, by ``mse_loss.out``, warns: it has another size than is given there.
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  // As of CUDA: ``parameter.data = `` may bring a Parameter here, and back.
  m.impl("_has_compatible_shallow_copy_type", +[](const Tensor&, const Tensor&) { return true; });
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("resize_", &resize);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("native_dropout", &dropout);
  implement_cells(m);
  m.impl("record_stream", +[](Tensor&, Stream) {});
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { implement_cells(m); }

// Autocast, with the operators in low and in full precision that CUDA has them in.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define IN_LOW_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FULL_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(IN_LOW_PRECISION)
  AT_FORALL_FP32(IN_FULL_PRECISION)
}

TORCH_LIBRARY(standin, m) {
  m.def("limit_memory(int num_bytes) -> int", +[](int64_t num_bytes) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    return static_cast<int64_t>(std::exchange(device_bytes, static_cast<size_t>(num_bytes)));
  });
  m.def("default_generator(int index) -> Generator?",
        +[](int64_t index) { return default_generator(static_cast<DeviceIndex>(index)); });
}

// --- the device, as torch asks for it ------------------------------------------------------------

// All work is done when it is asked for: streams differ in name alone, and events have happened.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  Device getDevice() const override { return {kType, current_device}; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kNumDevices, "There is no ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  Stream getStream(Device device) const override {
    const Device own = resolved(device.index());
    return Stream(Stream::UNSAFE, own, current_streams[own.index()]);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::DEFAULT, resolved(device.index()));
  }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return Stream(Stream::UNSAFE, resolved(device.index()), ++last);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override {
    *event = &current_device;  // anything but null
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kNumDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice({kType, index}); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice({kType, index}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(resolved(index).index());
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t num_bytes) const override {
    resize_bytes(storage, num_bytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
[[maybe_unused]] const bool is_registered = [] {
  c10::SetAllocator(kType, &memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace
