# cmake -DROOT=dir -DOUTPUT=file.cc "-DFILES=a;b/c" -P embed_files.cmake
# Writes the files (names relative to ROOT) into a C++ source that defines tessera::kEmbeddedFiles (server/page_files.h).
set(entries "")
foreach(name IN LISTS FILES)
  file(READ "${ROOT}/${name}" hex HEX)
  string(LENGTH "${hex}" digits)
  math(EXPR bytes "${digits} / 2")
  # Lines of 40 bytes; a hex escape ends at the next backslash or quote.
  string(REGEX REPLACE "(................................................................................)" "\\1\n" hex "${hex}")
  string(REGEX REPLACE "([0-9a-f][0-9a-f])" "\\\\x\\1" literal "${hex}")
  string(REPLACE "\n" "\"\n     \"" literal "${literal}")
  string(APPEND entries "    {\"${name}\",\n     {\"${literal}\", ${bytes}}},\n")
endforeach()
file(WRITE "${OUTPUT}.new" "// Written by cmake/embed_files.cmake.
#include \"server/page_files.h\"

namespace tessera {
namespace {

constexpr EmbeddedFile kFiles[] = {
${entries}};

}  // namespace

const std::span<const EmbeddedFile> kEmbeddedFiles(kFiles);

}  // namespace tessera
")
file(RENAME "${OUTPUT}.new" "${OUTPUT}")
