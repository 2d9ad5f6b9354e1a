// The collectives of the pretend accelerator: memory that the ranks of a group share, with a barrier and a
// place for each. It has no name, so nothing of it is left of ranks that are killed. A rank that does not
// come is waited for without end, as NCCL waits.
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "device.h"
#include "paddle/phi/common/bfloat16.h"
#include "paddle/phi/common/float16.h"
#include "runtime.h"

namespace {

constexpr size_t kPlace = 64 << 20;  // of each rank; what is not touched takes no memory
constexpr size_t kHead = 4096;

struct Head {
  std::atomic<int> is_ready;
  pthread_barrier_t barrier;
};

void fail(const char* what) {
  fprintf(stderr, "pretend accelerator: %s\n", what);
  abort();
}

size_t width(C_DataType type) {
  switch (type) {
    case BOOL: case UINT8: case INT8: return 1;
    case UINT16: case INT16: case FLOAT16: case BFLOAT16: return 2;
    case UINT32: case INT32: case FLOAT32: return 4;
    case UINT64: case INT64: case FLOAT64: case COMPLEX64: return 8;
    default: fail("a collective of an unknown type"); return 0;
  }
}

}  // namespace

// One group of ranks, in one of them.
struct C_CCLComm_st {
  size_t rank, ranks;
  Head* head;
  std::string path;

  char* place(size_t of) const { return reinterpret_cast<char*>(head) + kHead + of * kPlace; }
  void meet() const { pthread_barrier_wait(&head->barrier); }
  void give(const void* data, size_t size) const {
    if (size > kPlace) fail("a collective of more than 64 MB");
    memcpy(place(rank), pretend::address(data), size);
  }
};

namespace {

// Takes the elements of one rank into those of the ranks before it, which are summed in their order: so
// each rank has the same bits.
template <class T>
void fold_as(char* into, const char* from, size_t size, C_CCLReduceOp how) {
  auto a = reinterpret_cast<T*>(into);
  auto b = reinterpret_cast<const T*>(from);
  for (size_t i = 0; i < size; i++) switch (how) {
      case MAX: a[i] = a[i] > b[i] ? a[i] : b[i]; break;
      case MIN: a[i] = a[i] < b[i] ? a[i] : b[i]; break;
      case PRODUCT: a[i] = a[i] * b[i]; break;
      default: a[i] = a[i] + b[i];
    }
}

template <class T>
void divide_as(char* data, size_t size, size_t by) {
  for (size_t i = 0; i < size; i++) reinterpret_cast<T*>(data)[i] = reinterpret_cast<T*>(data)[i] / T(by);
}

template <class T>
void reduce_as(const C_CCLComm group, char* out, size_t start, size_t size, C_CCLReduceOp how) {
  memcpy(out, group->place(0) + start * sizeof(T), size * sizeof(T));
  for (size_t rank = 1; rank < group->ranks; rank++)
    fold_as<T>(out, group->place(rank) + start * sizeof(T), size, how);
  if (how == AVG) divide_as<T>(out, size, group->ranks);
}

// Writes the reduction of `size` elements from `start` on, of all ranks, to the device.
void reduce(
    const C_CCLComm group, void* target, size_t start, size_t size, C_DataType type, C_CCLReduceOp how) {
  std::vector<char> out(size * width(type));
  switch (type) {
    case FLOAT32: reduce_as<float>(group, out.data(), start, size, how); break;
    case FLOAT64: reduce_as<double>(group, out.data(), start, size, how); break;
    case FLOAT16: reduce_as<phi::dtype::float16>(group, out.data(), start, size, how); break;
    case BFLOAT16: reduce_as<phi::dtype::bfloat16>(group, out.data(), start, size, how); break;
    case INT64: reduce_as<int64_t>(group, out.data(), start, size, how); break;
    case INT32: reduce_as<int32_t>(group, out.data(), start, size, how); break;
    case INT8: reduce_as<int8_t>(group, out.data(), start, size, how); break;
    case UINT8: case BOOL: reduce_as<uint8_t>(group, out.data(), start, size, how); break;
    default: fail("a reduction of an unknown type");
  }
  memcpy(pretend::address(target), out.data(), out.size());
}

C_Status tell_path(C_CCLRootId* id) {
  int file = memfd_create("pretend", 0);
  snprintf(static_cast<char*>(id->data), id->sz, "/proc/%d/fd/%d", getpid(), file);
  return file < 0 ? C_FAILED : C_SUCCESS;
}

C_Status begin(size_t ranks, C_CCLRootId* id, size_t rank, C_CCLComm* group) {
  std::string path(static_cast<char*>(id->data));
  int file = open(path.c_str(), O_RDWR | O_CLOEXEC);  // of the first rank, which is there until all have met
  size_t size = kHead + kPlace * ranks;
  if (file < 0 || ftruncate(file, size)) fail("the first rank has ended, or there is no memory to share");
  void* pages = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (pages == MAP_FAILED) fail("no memory to share");
  close(file);
  *group = new C_CCLComm_st{rank, ranks, static_cast<Head*>(pages), path};
  Head* head = (*group)->head;
  if (rank == 0) {
    pthread_barrierattr_t shared;
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&head->barrier, &shared, ranks);
    head->is_ready = 1;
  }
  while (!head->is_ready) usleep(100);
  (*group)->meet();
  if (rank == 0) close(atoi(path.c_str() + path.rfind('/') + 1));
  return C_SUCCESS;
}

C_Status all_reduce(
    void* source, void* target, size_t size, C_DataType type, C_CCLReduceOp how, C_CCLComm group,
    C_Stream stream) {
  pretend::run(stream, [=] {
    group->give(source, size * width(type));
    group->meet();
    reduce(group, target, 0, size, type, how);
    group->meet();
  });
  return C_SUCCESS;
}

C_Status reduce_to_root(
    void* source, void* target, size_t size, C_DataType type, C_CCLReduceOp how, size_t root, C_CCLComm group,
    C_Stream stream) {
  pretend::run(stream, [=] {
    group->give(source, size * width(type));
    group->meet();
    if (group->rank == root) reduce(group, target, 0, size, type, how);
    group->meet();
  });
  return C_SUCCESS;
}

C_Status reduce_scatter(
    void* source, void* target, size_t size, C_DataType type, C_CCLReduceOp how, C_CCLComm group,
    C_Stream stream) {
  pretend::run(stream, [=] {
    group->give(source, size * group->ranks * width(type));
    group->meet();
    reduce(group, target, size * group->rank, size, type, how);
    group->meet();
  });
  return C_SUCCESS;
}

C_Status all_gather(
    void* source, void* target, size_t size, C_DataType type, C_CCLComm group, C_Stream stream) {
  pretend::run(stream, [=] {
    size_t bytes = size * width(type);
    group->give(source, bytes);
    group->meet();
    auto out = static_cast<char*>(pretend::address(target));
    for (size_t rank = 0; rank < group->ranks; rank++)
      memcpy(out + rank * bytes, group->place(rank), bytes);
    group->meet();
  });
  return C_SUCCESS;
}

C_Status broadcast(void* data, size_t size, C_DataType type, size_t root, C_CCLComm group, C_Stream stream) {
  pretend::run(stream, [=] {
    size_t bytes = size * width(type);
    if (group->rank == root) group->give(data, bytes);
    group->meet();
    if (group->rank != root) memcpy(pretend::address(data), group->place(root), bytes);
    group->meet();
  });
  return C_SUCCESS;
}

}  // namespace

void add_collectives(C_DeviceInterface* table) {
  table->xccl_get_unique_id_size = [](size_t* size) { *size = 64; return C_SUCCESS; };
  table->xccl_get_unique_id = tell_path;
  table->xccl_comm_init_rank = begin;
  table->xccl_destroy_comm = [](C_CCLComm) { return C_SUCCESS; };  // what is queued may still use it
  table->xccl_get_comm_name = [](C_CCLComm group, char* name) {
    strcpy(name, group->path.c_str());
    return C_SUCCESS;
  };
  table->xccl_all_reduce = all_reduce;
  table->xccl_reduce = reduce_to_root;
  table->xccl_reduce_scatter = reduce_scatter;
  table->xccl_all_gather = all_gather;
  table->xccl_broadcast = broadcast;
  table->xccl_group_start = [] { return C_SUCCESS; };
  table->xccl_group_end = [] { return C_SUCCESS; };
}
