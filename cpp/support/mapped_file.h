// Files as memory: read-only maps that processes share, scratch arrays that may spill, whole
// outputs.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

namespace dart {

// An owned memory mapping; unmapped when it dies.
class Mapping {
 public:
  Mapping() = default;
  Mapping(void* data, size_t bytes, bool file) : data_(data), bytes_(bytes), file_(file) {}
  ~Mapping();
  Mapping(Mapping&& other) noexcept { swap(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    swap(other);
    return *this;
  }

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t size() const { return bytes_; }
  // Whether dropped pages come back from a file.
  bool backed_by_file() const { return file_; }

 private:
  void swap(Mapping& other) {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(file_, other.file_);
  }

  void* data_ = nullptr;
  size_t bytes_ = 0;
  bool file_ = false;
};

// A whole regular file, read-only. Pages are read when touched and shared between processes.
// Throws std::invalid_argument that names the path. The file must not shrink while it is mapped.
Mapping map_file(const std::string& path);

// Zeroed private memory.
Mapping map_memory(size_t bytes);

// Tells the kernel that `map` is about to be read once, from front to back.
void read_sequentially(const Mapping& map);

// Gives back the pages of map[0, end) of a file; they are read again if touched.
void drop_pages(const Mapping& map, size_t end);

// A file that appears under its name only when it is complete: commit() renames it into place.
// Space is reserved first, so that a full disk is an exception here and not a signal later.
class OutputFile {
 public:
  OutputFile(std::string path, size_t bytes);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  std::span<std::byte> bytes() const { return {map_.data(), map_.size()}; }
  void commit();

 private:
  std::string path_;
  std::string part_;
  Mapping map_;
};

// Zero-initialised bytes that grow: in a nameless file of `folder`, so that the kernel can write
// them out when memory is short, or in memory alone if `folder` is empty.
class ScratchBytes {
 public:
  explicit ScratchBytes(std::string folder) : folder_(std::move(folder)) {}
  ~ScratchBytes();
  ScratchBytes(ScratchBytes&& other) noexcept { *this = std::move(other); }
  ScratchBytes& operator=(ScratchBytes&& other) noexcept;

  std::byte* data() const { return data_; }
  void reserve(size_t bytes);
  size_t capacity() const { return capacity_; }

 private:
  void* grow_memory(size_t bytes);
  void* grow_file(size_t bytes);

  std::string folder_;
  std::byte* data_ = nullptr;
  size_t capacity_ = 0;
  int file_ = -1;
};

// A growing array of plain values over ScratchBytes.
template <typename T>
class ScratchArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  explicit ScratchArray(std::string folder) : bytes_(std::move(folder)) {}

  size_t size() const { return size_; }
  T* data() const { return reinterpret_cast<T*>(bytes_.data()); }
  T& operator[](size_t i) {
    assert(i < size_);
    return data()[i];
  }
  const T& operator[](size_t i) const {
    assert(i < size_);
    return data()[i];
  }
  std::span<const T> view() const { return {data(), size_}; }

  // New places hold zero bytes.
  void resize(size_t size) {
    bytes_.reserve(size * sizeof(T));
    size_ = size;
  }
  void push_back(const T& value) {
    if ((size_ + 1) * sizeof(T) > bytes_.capacity()) {
      bytes_.reserve(2 * bytes_.capacity() + (size_t{1} << 16));
    }
    data()[size_++] = value;
  }

 private:
  ScratchBytes bytes_;
  size_t size_ = 0;
};

}  // namespace dart
