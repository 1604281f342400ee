#include "verify.h"

#include <cstring>
#include <new>

#define KVLOOM_API extern "C" __attribute__((visibility("default")))

namespace kvloom {
namespace {

// The fixed part of a header: see `_FIXED` in envelope.py.
constexpr uint64_t FIXED_BYTES = 112, ROW_BYTES = 24, CHECKSUM_AT = 40, CHECKSUM_BYTES = 16, ALIGN_BYTES = 4096;
constexpr uint64_t MAX_DESCRIPTION_BYTES = 16 << 10;
constexpr uint16_t VERSION = 1;
constexpr char MAGIC[] = "KVLOOM\r\n";

template <typename T>
T read_at(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// As `longest_header` in envelope.py.
uint64_t longest_header(uint64_t buffers) {
    const uint64_t bytes = FIXED_BYTES + MAX_DESCRIPTION_BYTES + ROW_BYTES * buffers;
    return (bytes + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
}

bool is_digest(const Digest& digest, const uint8_t* expected) {
    const uint64_t bytes[2] = {__builtin_bswap64(digest.high), __builtin_bswap64(digest.low)};
    return std::memcmp(bytes, expected, sizeof bytes) == 0;
}

}  // namespace

void Verifier::begin(const uint8_t* data, uint64_t size, uint32_t max_buffers) {
    state_ = ARRIVING;
    max_buffers_ = max_buffers;
    rows_ = row_ = 0;
    data_ = data;
    size_ = size;
    table_at_ = row_begin_ = row_end_ = 0;
    header_right_ = false;
}

bool Verifier::filled(uint64_t arrived) {
    if (state_ != ARRIVING) return state_ == RIGHT;
    if (arrived > size_ || !(header_right_ || read_header(arrived)) || !(!header_right_ || check_rows(arrived))) {
        state_ = NOT_RIGHT;
    }
    return state_ != NOT_RIGHT;
}

// Whether the header is right, or has not arrived yet.
bool Verifier::read_header(uint64_t arrived) {
    if (arrived < FIXED_BYTES) return arrived < size_;
    if (std::memcmp(data_, MAGIC, 8) != 0) return false;
    const auto version = read_at<uint16_t>(data_ + 8), flags = read_at<uint16_t>(data_ + 10);
    const uint64_t header_bytes = read_at<uint32_t>(data_ + 12), text_bytes = read_at<uint32_t>(data_ + 16);
    const uint32_t rows = read_at<uint32_t>(data_ + 20);
    const auto payload_bytes = read_at<uint64_t>(data_ + 24);
    if (version != VERSION || flags != 0) return false;
    if (text_bytes > MAX_DESCRIPTION_BYTES || rows > max_buffers_ || header_bytes % ALIGN_BYTES != 0) return false;
    table_at_ = FIXED_BYTES + text_bytes;
    if (table_at_ + ROW_BYTES * rows > header_bytes || header_bytes > longest_header(max_buffers_)) return false;
    if (header_bytes > size_ || payload_bytes != size_ - header_bytes) return false;
    if (arrived < header_bytes) return true;

    uint8_t first[xxh3::STRIPE * xxh3::STRIPES_OF_A_BLOCK];  // with zeros in place of the checksum, as it is computed
    std::memcpy(first, data_, sizeof first);
    std::memset(first + CHECKSUM_AT, 0, CHECKSUM_BYTES);
    hash_.begin(first, header_bytes);
    hash_.update(sizeof first);
    hash_.move(data_);
    if (!is_digest(hash_.digest(), data_ + CHECKSUM_AT)) return false;

    uint64_t sum = 0;
    for (uint32_t row = 0; row < rows; ++row) {
        const auto length = read_at<uint64_t>(data_ + table_at_ + ROW_BYTES * row);
        if (length > payload_bytes - sum) return false;
        sum += length;
    }
    if (sum != payload_bytes) return false;
    rows_ = rows;
    row_end_ = header_bytes;
    header_right_ = true;
    return true;
}

// Whether every buffer that has arrived is right. A buffer begins where the one before it ends.
bool Verifier::check_rows(uint64_t arrived) {
    for (;;) {
        if (row_ > 0) {
            hash_.update(arrived < row_end_ ? arrived - row_begin_ : row_end_ - row_begin_);
            if (arrived < row_end_) return true;
            if (!is_digest(hash_.digest(), data_ + table_at_ + ROW_BYTES * (row_ - 1) + 8)) return false;
        }
        if (row_ == rows_) {
            state_ = RIGHT;
            return true;
        }
        row_begin_ = row_end_;
        const auto length = read_at<uint64_t>(data_ + table_at_ + ROW_BYTES * row_);
        if (length > size_ - row_begin_) return false;  // shared memory may have changed since the header was read
        row_end_ += length;
        hash_.begin(data_ + row_begin_, row_end_ - row_begin_);
        ++row_;
    }
}

}  // namespace kvloom

// -- what Python calls: kvloom/format/native_verifier.py ------------------------------------------------------------

#ifndef KVLOOM_INTERFACE  // of interface.cmake
#define KVLOOM_INTERFACE ""
#endif

KVLOOM_API const char* kvloom_interface() { return KVLOOM_INTERFACE; }

KVLOOM_API uint64_t kvloom_verifier_bytes() { return sizeof(kvloom::Verifier); }

KVLOOM_API void kvloom_verifier_begin(void* state, const uint8_t* data, uint64_t size, uint32_t max_buffers) {
    (new (state) kvloom::Verifier)->begin(data, size, max_buffers);
}

KVLOOM_API int kvloom_verifier_filled(void* state, uint64_t num_bytes) {
    return static_cast<kvloom::Verifier*>(state)->filled(num_bytes) ? 0 : 1;
}

// Whether each of `count` blobs, which are there as a whole, is right. Returns how many are.
KVLOOM_API int kvloom_verify(const uint8_t* const* blobs, const uint64_t* sizes, uint32_t count, uint32_t max_buffers,
                             uint8_t* right) {
    int found = 0;
    for (uint32_t number = 0; number < count; ++number) {
        kvloom::Verifier verifier;
        verifier.begin(blobs[number], sizes[number], max_buffers);
        right[number] = verifier.filled(sizes[number]) && verifier.right();
        found += right[number];
    }
    return found;
}
