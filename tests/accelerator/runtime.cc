// A pretend accelerator for PaddlePaddle: memory that the host cannot touch, streams that are threads.
//
// It is a plug-in for devices (paddle/phi/backends/device_ext.h). A pointer of the device lies in pages
// without any rights, so code that takes it for the host's memory crashes, as on a GPU; the same pages are
// mapped once more, where this library alone looks (`address`). New memory is not zero. Settings:
//
//   PRETEND_DEVICES    how many there are; 4
//   PRETEND_MEGABYTES  memory of each; 2048
//   PRETEND_DELAY_US   how much longer each queued thing takes; 0
//   PRETEND_LAZY       1: a queued copy from the host reads it when its turn comes, as from pinned memory
#include "runtime.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "device.h"
#include "paddle/common/enforce.h"

long setting(const char* name, long otherwise) {
  const char* value = getenv(name);
  return value && *value ? atol(value) : otherwise;
}

namespace {

constexpr size_t kMostDevices = 16;
constexpr size_t kAlignment = 512;
constexpr int kNeverWritten = 0x7f;  // of which floats are large, and no two runs zero by chance

size_t num_devices() { return std::min<size_t>(setting("PRETEND_DEVICES", 4), kMostDevices); }

// --- forks -----------------------------------------------------------------------------------

// A fork has no threads and shares the pages, so it cannot use the device if its parent has, as on CUDA.
bool is_lost = false;

void use() {
  if (is_lost) PADDLE_THROW(common::errors::Unavailable("A fork of a process that has used it cannot use it."));
  static int watched = pthread_atfork(nullptr, nullptr, [] { is_lost = true; });
  if (watched) abort();
}

// --- memory ----------------------------------------------------------------------------------

// The memory of one device. It is made at the first use: a fork from before has its own.
class Memory {
 public:
  static size_t size() { return size_t(setting("PRETEND_MEGABYTES", 2048)) << 20; }

  void* allocate(size_t wanted) {
    use();
    std::lock_guard<std::mutex> lock(mutex_);
    if (!device_) map();
    size_t size = std::max((wanted + kAlignment - 1) / kAlignment * kAlignment, kAlignment);
    for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
      auto [start, length] = *gap;
      if (length < size) continue;
      gaps_.erase(gap);
      if (length > size) gaps_[start + size] = length - size;
      taken_[start] = size;
      used_ += size;
      memset(host_ + start, kNeverWritten, size);
      return device_ + start;
    }
    return nullptr;
  }

  bool release(void* pointer) {
    if (is_lost) return true;
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = taken_.find(static_cast<char*>(pointer) - device_);
    if (found == taken_.end()) return false;
    auto [start, size] = *found;
    taken_.erase(found);
    used_ -= size;
    auto gap = gaps_.emplace(start, size).first;
    join(gap, std::next(gap));
    if (gap != gaps_.begin()) join(std::prev(gap), gap);
    return true;
  }

  // The same byte where the host may touch it; null: it is not of this device.
  void* address(const void* pointer) const {
    auto offset = static_cast<const char*>(pointer) - device_;
    return device_ && offset >= 0 && size_t(offset) < size_ ? host_ + offset : nullptr;
  }

  size_t used() const { return used_; }

 private:
  using Gaps = std::map<size_t, size_t>;  // where one begins, and its length

  void map() {
    size_ = size();
    int file = memfd_create("pretend", 0);
    if (ftruncate(file, size_)) abort();
    auto pages = [&](int rights) {
      void* found = mmap(nullptr, size_, rights, MAP_SHARED | MAP_NORESERVE, file, 0);
      if (found == MAP_FAILED) abort();
      return static_cast<char*>(found);
    };
    host_ = pages(PROT_READ | PROT_WRITE);
    device_ = pages(PROT_NONE);
    close(file);
    gaps_[0] = size_;
  }

  void join(Gaps::iterator first, Gaps::iterator second) {
    if (second == gaps_.end() || first->first + first->second != second->first) return;
    first->second += second->second;
    gaps_.erase(second);
  }

  std::mutex mutex_;
  char *device_ = nullptr, *host_ = nullptr;
  size_t size_ = 0, used_ = 0;
  Gaps gaps_, taken_;
};

// What threads use is never destroyed: they run until the process has ended.
auto& memories = *new std::array<Memory, kMostDevices>;
thread_local int current = 0;

// --- streams ---------------------------------------------------------------------------------

auto& queues_mutex = *new std::mutex;
auto& queues = *new std::vector<std::shared_ptr<Queue>>;

}  // namespace

C_Stream_st::C_Stream_st() {
  use();
  std::thread([queue = queue] { queue->work(); }).detach();
  std::lock_guard<std::mutex> lock(queues_mutex);
  queues.push_back(queue);
}

C_Stream_st::~C_Stream_st() {
  if (is_lost) return;
  queue->close();
  std::lock_guard<std::mutex> lock(queues_mutex);
  queues.erase(std::find(queues.begin(), queues.end(), queue));
}

void Queue::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_closed_ = true;
  has_work_.notify_all();
}

void Queue::end() {
  std::unique_lock<std::mutex> lock(mutex_);
  queue_.clear();
  is_closed_ = is_over_ = true;
  has_work_.notify_all();
  has_done_.notify_all();
  // A kernel must not outlive paddle, but a collective may wait for ever.
  has_done_.wait_for(lock, std::chrono::milliseconds(200), [this] { return !is_busy_; });
}

// At the exit, before what kernels use is destroyed.
void end_all() {
  if (is_lost) return;
  for (auto& queue : queues) queue->end();
}

void Queue::work() {
  long delay = setting("PRETEND_DELAY_US", 0);
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    has_work_.wait(lock, [this] { return is_closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    auto next = std::move(queue_.front());
    queue_.pop_front();
    is_busy_ = true;
    lock.unlock();
    if (delay) usleep(delay);
    next();
    next = nullptr;  // what it holds is let go before it counts as done
    lock.lock();
    is_busy_ = false;
    done_++;
    has_done_.notify_all();
  }
}

void Queue::push(std::function<void()> work) {
  use();
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_over_) return;
  queue_.push_back(std::move(work));
  pushed_++;
  has_work_.notify_one();
}

size_t Queue::pushed() {
  use();
  std::lock_guard<std::mutex> lock(mutex_);
  return pushed_;
}

bool Queue::has_done(size_t number) {
  use();
  std::lock_guard<std::mutex> lock(mutex_);
  return is_over_ || done_ >= number;
}

void Queue::wait(size_t number) {
  use();
  std::unique_lock<std::mutex> lock(mutex_);
  has_done_.wait(lock, [&] { return is_over_ || done_ >= number; });
}

// An event: a place in a stream.
struct C_Event_st {
  std::shared_ptr<Queue> queue;
  size_t number = 0;  // of what was queued before it
};

namespace pretend {

void* address(const void* pointer) {
  for (auto& memory : memories)
    if (void* found = memory.address(pointer)) return found;
  return const_cast<void*>(pointer);
}

void drain() {
  use();
  std::vector<std::shared_ptr<Queue>> all;
  {
    std::lock_guard<std::mutex> lock(queues_mutex);
    all = queues;
  }
  for (auto& queue : all) queue->wait(queue->pushed());
}

void run(void* stream, std::function<void()> work) {
  if (stream) return static_cast<C_Stream>(stream)->queue->push(std::move(work));
  drain();
  work();
}

}  // namespace pretend

namespace {

using pretend::address;

// --- what is counted, in the order of tests/pretend.py -----------------------------------------

enum Count {
  kSynchronized, kToDevice, kToHost, kWithin, kQueuedToDevice, kQueuedToHost, kQueuedWithin, kCounts
};
std::atomic<long> counts[kCounts];

C_Status done(bool is_good = true) { return is_good ? C_SUCCESS : C_FAILED; }

// --- copies ------------------------------------------------------------------------------------

template <Count which>
C_Status copy_now(const C_Device, void* target, const void* source, size_t size) {
  counts[which]++;
  pretend::drain();
  memcpy(address(target), address(source), size);
  return done();
}

template <Count queued, Count waited>
C_Status copy_later(const C_Device device, C_Stream stream, void* target, const void* source, size_t size) {
  if (!stream) return copy_now<waited>(device, target, source, size);
  counts[queued]++;
  stream->queue->push([=] { memcpy(address(target), address(source), size); });
  return done();
}

// From the host's ordinary memory: it is read before this returns, as on CUDA, unless it is asked to wait.
C_Status copy_from_host_later(
    const C_Device device, C_Stream stream, void* target, const void* source, size_t size) {
  if (!stream || setting("PRETEND_LAZY", 0))
    return copy_later<kQueuedToDevice, kToDevice>(device, stream, target, source, size);
  counts[kQueuedToDevice]++;
  auto staged = std::make_shared<std::string>(static_cast<const char*>(source), size);
  stream->queue->push([=] { memcpy(address(target), staged->data(), size); });
  return done();
}

C_Status copy_between(const C_Device, const C_Device to, void* target, const void* source, size_t size) {
  return copy_now<kWithin>(to, target, source, size);
}

C_Status copy_between_later(
    const C_Device, const C_Device to, C_Stream stream, void* target, const void* source, size_t size) {
  return copy_later<kQueuedWithin, kWithin>(to, stream, target, source, size);
}

C_Status set_memory(const C_Device, void* pointer, unsigned char value, size_t size) {
  pretend::drain();
  memset(address(pointer), value, size);
  return done();
}

// y = a x + b y, which paddle takes from the table and not from a kernel.
template <class T>
void add_scaled(size_t size, float a, const T* x, float b, T* y) {
  for (size_t i = 0; i < size; i++) y[i] = a * x[i] + b * y[i];
}

C_Status axpby(
    const C_Device, C_Stream stream, C_DataType type, size_t size, float a, void* x, float b, void* y) {
  if (type != FLOAT32 && type != FLOAT64) return done(false);
  pretend::run(stream, [=] {
    if (type == FLOAT32) add_scaled<float>(size, a, (float*)address(x), b, (float*)address(y));
    if (type == FLOAT64) add_scaled<double>(size, a, (double*)address(x), b, (double*)address(y));
  });
  return done();
}

// --- paddle's table ------------------------------------------------------------------------------

C_Status answer(size_t* where, size_t what) {
  *where = what;
  return done();
}

void add_devices(C_DeviceInterface* table) {
  table->initialize = [] { return done(); };
  table->finalize = [] { return done(); };
  table->init_device = [](const C_Device) { return done(); };
  table->deinit_device = [](const C_Device) { return done(); };
  table->set_device = [](const C_Device device) { current = device->id; return done(); };
  table->get_device = [](const C_Device device) { device->id = current; return done(); };
  table->get_device_count = [](size_t* count) { return answer(count, num_devices()); };
  table->get_device_list = [](size_t* ids) {
    for (size_t id = 0; id < num_devices(); id++) ids[id] = id;
    return done();
  };
  table->get_compute_capability = [](const C_Device, size_t* version) { return answer(version, 1); };
  table->get_runtime_version = [](const C_Device, size_t* version) { return answer(version, 1); };
  table->get_driver_version = [](const C_Device, size_t* version) { return answer(version, 1); };
  table->is_float16_supported = [](const C_Device, bool* is) { return done(*is = true); };
  table->is_bfloat16_supported = [](const C_Device, bool* is) { return done(*is = true); };
}

void add_memory(C_DeviceInterface* table) {
  table->device_memory_allocate = [](const C_Device device, void** pointer, size_t size) {
    return done(*pointer = memories[device->id].allocate(size));
  };
  table->device_memory_deallocate = [](const C_Device device, void* pointer, size_t) {
    if (!is_lost) pretend::drain();  // what is queued may still use it
    return done(memories[device->id].release(pointer));
  };
  table->device_memory_set = set_memory;
  table->host_memory_allocate = [](const C_Device, void** pointer, size_t size) {
    return done(*pointer = malloc(size));
  };
  table->host_memory_deallocate = [](const C_Device, void* pointer, size_t) {
    free(pointer);
    return done();
  };
  table->unified_memory_allocate = table->host_memory_allocate;
  table->unified_memory_deallocate = table->host_memory_deallocate;
  table->device_memory_stats = [](const C_Device device, size_t* total, size_t* free) {
    *total = Memory::size();
    return answer(free, *total - memories[device->id].used());
  };
  table->device_min_chunk_size = [](const C_Device, size_t* size) { return answer(size, kAlignment); };
  table->device_max_alloc_size = [](const C_Device, size_t* size) { return answer(size, Memory::size()); };
  table->device_init_alloc_size = [](const C_Device, size_t* size) { return answer(size, 16 << 20); };
  table->device_realloc_size = table->device_init_alloc_size;
  table->device_extra_padding_size = [](const C_Device, size_t* size) { return answer(size, 0); };
  table->memory_copy_h2d = copy_now<kToDevice>;
  table->memory_copy_d2h = copy_now<kToHost>;
  table->memory_copy_d2d = copy_now<kWithin>;
  table->memory_copy_p2p = copy_between;
  table->async_memory_copy_h2d = copy_from_host_later;
  table->async_memory_copy_d2h = copy_later<kQueuedToHost, kToHost>;
  table->async_memory_copy_d2d = copy_later<kQueuedWithin, kWithin>;
  table->async_memory_copy_p2p = copy_between_later;
  table->blas_axpby = axpby;
}

void add_streams(C_DeviceInterface* table) {
  table->create_stream = [](const C_Device, C_Stream* stream) { return done(*stream = new C_Stream_st); };
  table->destroy_stream = [](const C_Device, C_Stream stream) { delete stream; return done(); };
  table->query_stream = [](const C_Device, C_Stream stream) {
    return done(stream->queue->has_done(stream->queue->pushed()));
  };
  table->stream_add_callback = [](const C_Device device, C_Stream stream, C_Callback callback, void* data) {
    stream->queue->push([=, id = device->id] {
      C_Device_st of{id};
      C_Status status = C_SUCCESS;
      callback(&of, stream, data, &status);
    });
    return done();
  };
  table->create_event = [](const C_Device, C_Event* event) { return done(*event = new C_Event_st); };
  table->destroy_event = [](const C_Device, C_Event event) { delete event; return done(); };
  table->record_event = [](const C_Device, C_Stream stream, C_Event event) {
    *event = {stream->queue, stream->queue->pushed()};
    return done();
  };
  table->query_event = [](const C_Device, C_Event event) {
    return done(!event->queue || event->queue->has_done(event->number));
  };
  table->stream_wait_event = [](const C_Device, C_Stream stream, C_Event event) {
    C_Event_st until = *event;
    if (until.queue && until.queue != stream->queue)
      stream->queue->push([=] { until.queue->wait(until.number); });
    return done();
  };
  table->synchronize_device = [](const C_Device) {
    counts[kSynchronized]++;
    pretend::drain();
    return done();
  };
  table->synchronize_stream = [](const C_Device, C_Stream stream) {
    counts[kSynchronized]++;
    if (stream) stream->queue->wait(stream->queue->pushed());
    return done();
  };
  table->synchronize_event = [](const C_Device, C_Event event) {
    counts[kSynchronized]++;
    if (event->queue) event->queue->wait(event->number);
    return done();
  };
}

}  // namespace

extern "C" {
long pretend_count(int which) { return counts[which]; }
}

void InitPlugin(CustomRuntimeParams* params) {
  PADDLE_CUSTOM_RUNTIME_CHECK_VERSION(params);
  atexit(end_all);
  params->device_type = const_cast<char*>(PRETEND_NAME);
  params->sub_device_type = const_cast<char*>("v1");
  memset(static_cast<void*>(params->interface), 0, sizeof(C_DeviceInterface));
  add_devices(params->interface);
  add_memory(params->interface);
  add_streams(params->interface);
  add_collectives(params->interface);
}
