// What the parts of the pretend accelerator share: its name, its memory and its queues.
#pragma once
#include <functional>

// Paddle asks custom devices by name whether amp may use bfloat16 (paddle/amp/auto_cast.py,
// _is_custom_device_bfloat16_supported). Of those that may, it treats this one in no way of its own.
#define PRETEND intel_hpu
#define PRETEND_NAME "intel_hpu"

namespace pretend {

// Queues work on a stream. Without a stream it runs now, after all that is queued anywhere.
void run(void* stream, std::function<void()> work);

// Waits until nothing is queued on any stream.
void drain();

// Returns where the host may touch what a pointer of the device points to. Only queued work may
// ask, or what has drained the queues; a pointer of the host is returned as it is.
void* address(const void* pointer);
template <class T>
T* real(T* pointer) {
  return static_cast<T*>(address(pointer));
}

}  // namespace pretend
