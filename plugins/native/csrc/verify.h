// Verifies an unsigned framed blob while its bytes arrive. The format is that of kvloom/format/envelope.py.
//
// "Right" means that the sizes in the header agree with each other and with the blob, and that the header's checksum and the
// digest of every buffer are those of the bytes. What the header's description says, and whether this process can use it,
// is not looked at. Whatever is signed, of a later version or odd in any other way is not right: Python then says what it is.
#pragma once

#include <cstdint>

#include "xxh3.h"

namespace kvloom {

class Verifier {
  public:
    enum State : uint32_t { ARRIVING = 0, RIGHT = 1, NOT_RIGHT = 2 };

    void begin(const uint8_t* data, uint64_t size, uint32_t max_buffers);
    // The first `arrived` bytes are there. Returns whether it can still come right.
    bool filled(uint64_t arrived);
    bool right() const { return state_ == RIGHT; }

  private:
    bool read_header(uint64_t arrived);
    bool check_rows(uint64_t arrived);

    uint32_t state_;  // the first field: Python reads it
    uint32_t max_buffers_, rows_, row_;
    const uint8_t* data_;
    uint64_t size_, table_at_, row_begin_, row_end_;
    bool header_right_;
    Hash hash_;
};

}  // namespace kvloom
