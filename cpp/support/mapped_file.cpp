#include "support/mapped_file.h"

#include <cerrno>
#include <cstdlib>
#include <new>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/check.h"

namespace dart {
namespace {

[[noreturn]] void fail_with_errno(const std::string& path, const char* action, int error) {
  fail<std::invalid_argument>(path, ": cannot ", action, ": ", std::strerror(error));
}

// A descriptor that closes itself; the mapping outlives it.
struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

void* map_or_fail(const std::string& path, size_t bytes, int protection, int flags, int fd) {
  void* data = ::mmap(nullptr, bytes, protection, flags, fd, 0);
  if (data == MAP_FAILED) fail_with_errno(path, "map", errno);
  return data;
}

void reserve_space(const std::string& path, int fd, size_t bytes) {
  const int error = ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  if (error != 0) fail_with_errno(path, "reserve disk space", error);
}

// The file vanishes with its last descriptor, however the process ends.
int open_nameless(const std::string& folder) {
  std::string name = folder + "/.ngram-XXXXXX";
  const int fd = ::mkostemp(name.data(), O_CLOEXEC);
  if (fd < 0) fail_with_errno(folder, "create a scratch file here", errno);
  ::unlink(name.c_str());
  return fd;
}

}  // namespace

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

Mapping map_file(const std::string& path) {
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0) fail_with_errno(path, "open", errno);
  struct stat status {};
  if (::fstat(file.fd, &status) != 0) fail_with_errno(path, "stat", errno);
  DART_CHECK(S_ISREG(status.st_mode), path, ": not a regular file");
  // mmap() refuses an empty range; an empty file is for the caller to judge.
  if (status.st_size == 0) return {};
  const auto bytes = static_cast<size_t>(status.st_size);
  return {map_or_fail(path, bytes, PROT_READ, MAP_SHARED, file.fd), bytes, true};
}

Mapping map_memory(size_t bytes) {
  if (bytes == 0) return {};
  return {map_or_fail("memory", bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1),
          bytes, false};
}

void read_sequentially(const Mapping& map) {
  if (map.backed_by_file()) ::madvise(map.data(), map.size(), MADV_SEQUENTIAL);
}

void drop_pages(const Mapping& map, size_t end) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  if (map.backed_by_file() && end >= page) ::madvise(map.data(), end / page * page, MADV_DONTNEED);
}

OutputFile::OutputFile(std::string path, size_t bytes)
    : path_(std::move(path)), part_(path_ + ".part" + std::to_string(::getpid())) {
  const Descriptor file{::open(part_.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)};
  if (file.fd < 0) fail_with_errno(part_, "create", errno);
  try {
    reserve_space(part_, file.fd, bytes);
    map_ = {map_or_fail(part_, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd), bytes, true};
  } catch (...) {
    ::unlink(part_.c_str());
    throw;
  }
}

OutputFile::~OutputFile() {
  if (!part_.empty()) ::unlink(part_.c_str());
}

void OutputFile::commit() {
  if (::msync(map_.data(), map_.size(), MS_SYNC) != 0) fail_with_errno(part_, "write", errno);
  if (::rename(part_.c_str(), path_.c_str()) != 0) fail_with_errno(path_, "rename into", errno);
  part_.clear();
}

ScratchBytes::~ScratchBytes() {
  if (file_ < 0) {
    std::free(data_);
    return;
  }
  if (data_ != nullptr) ::munmap(data_, capacity_);
  ::close(file_);
}

ScratchBytes& ScratchBytes::operator=(ScratchBytes&& other) noexcept {
  std::swap(folder_, other.folder_);
  std::swap(data_, other.data_);
  std::swap(capacity_, other.capacity_);
  std::swap(file_, other.file_);
  return *this;
}

void ScratchBytes::reserve(size_t bytes) {
  if (bytes <= capacity_) return;
  data_ = static_cast<std::byte*>(folder_.empty() ? grow_memory(bytes) : grow_file(bytes));
  capacity_ = bytes;
}

void* ScratchBytes::grow_memory(size_t bytes) {
  void* data = std::realloc(data_, bytes);
  if (data == nullptr) throw std::bad_alloc();
  std::memset(static_cast<std::byte*>(data) + capacity_, 0, bytes - capacity_);
  return data;
}

void* ScratchBytes::grow_file(size_t bytes) {
  if (file_ < 0) file_ = open_nameless(folder_);
  reserve_space(folder_, file_, bytes);
  void* data = data_ == nullptr
                   ? ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0)
                   : ::mremap(data_, capacity_, bytes, MREMAP_MAYMOVE);
  if (data == MAP_FAILED) fail_with_errno(folder_, "map a scratch file here", errno);
  return data;
}

}  // namespace dart
