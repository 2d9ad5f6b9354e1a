// The queues of the pretend accelerator, as paddle sees them, for those who implement its interface.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "paddle/phi/backends/device_ext.h"

// A thread that does one thing after another.
class Queue {
 public:
  void push(std::function<void()> work);
  size_t pushed();               // how many things were queued until now
  bool has_done(size_t number);  // whether the first so many are done
  void wait(size_t number);      // until they are
  void work();                   // what the thread does, until it is closed and all is done
  void close();
  void end();  // drops what is queued: nothing is waited for any more

 private:
  std::mutex mutex_;
  std::condition_variable has_work_, has_done_;
  std::deque<std::function<void()>> queue_;
  size_t pushed_ = 0, done_ = 0;
  bool is_closed_ = false, is_busy_ = false, is_over_ = false;
};

// A stream. What waits for it, and its thread, may outlive it.
struct C_Stream_st {
  C_Stream_st();
  ~C_Stream_st();
  std::shared_ptr<Queue> queue = std::make_shared<Queue>();
};

// The library's setting of this name in the environment, or the default.
long setting(const char* name, long otherwise);

// Sets the collectives in paddle's table.
void add_collectives(C_DeviceInterface* table);
