// attention.clamp_position: out[i] = max(seq_lens[i], 1) - 1 as 64-bit integers.
//
// Two elements a thread: one 8- or 16-byte load and one 16-byte store. One H200, replayed graph, us
// for 64 | 2**24 int32: two elements 1.03 | 50.3, one element 1.03 | 58.8, four elements 1.08 | 54.3.

using Position = long long;

template <typename Length>
struct alignas(2 * sizeof(Length)) Pair {
  Length first, second;
};

template <typename Length>
__device__ Position position(Length length) {
  return static_cast<Position>((length > 1 ? length : 1) - 1);
}

template <typename Length>
__device__ void contiguous(const Length *seq_lens, Position *out, long long size) {
  const long long index = 2 * (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x);
  if (index + 1 < size) {
    const auto lengths = *reinterpret_cast<const Pair<Length> *>(seq_lens + index);
    *reinterpret_cast<Pair<Position> *>(out + index) = {position(lengths.first), position(lengths.second)};
  } else if (index < size) {
    out[index] = position(seq_lens[index]);
  }
}

template <typename Length>
__device__ void strided(const Length *seq_lens, Position *out, long long size, long long seq_lens_stride,
                        long long out_stride) {
  const long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index < size) out[index * out_stride] = position(seq_lens[index * seq_lens_stride]);
}

extern "C" {
__global__ void contiguous_int32(const int *seq_lens, Position *out, long long size) {
  contiguous(seq_lens, out, size);
}
__global__ void contiguous_int64(const long long *seq_lens, Position *out, long long size) {
  contiguous(seq_lens, out, size);
}
__global__ void strided_int32(const int *seq_lens, Position *out, long long size, long long seq_lens_stride,
                              long long out_stride) {
  strided(seq_lens, out, size, seq_lens_stride, out_stride);
}
__global__ void strided_int64(const long long *seq_lens, Position *out, long long size,
                              long long seq_lens_stride, long long out_stride) {
  strided(seq_lens, out, size, seq_lens_stride, out_stride);
}
}
