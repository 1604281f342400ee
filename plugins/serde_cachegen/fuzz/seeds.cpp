// Writes inputs for a fuzzer to begin from: seeds DECODE_DIRECTORY
#include <fstream>
#include <string>

#include "examples.h"

int main(int count, char** arguments) {
  if (count != 2) return 2;
  int number = 0;
  fuzz::examples([&](const KvzGeometry&, uint8_t choice, int mode, const std::vector<uint8_t>& stream) {
    if (stream.size() > 4096) return;
    for (uint8_t mended : {uint8_t(fuzz::kNothing), uint8_t(fuzz::kGeometry | fuzz::kSizes | fuzz::kEnd)}) {
      std::ofstream file(std::string(arguments[1]) + "/seed-" + std::to_string(mode) + "-" + std::to_string(++number), std::ios::binary);
      file.put(char(choice)).put(char(mended));
      file.write(reinterpret_cast<const char*>(stream.data()), std::streamsize(stream.size()));
    }
  });
  printf("%d seeds\n", number);
}
