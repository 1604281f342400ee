# INTERFACE: a hash of the functions that Python calls and of the structs that it shares with them, as they are declared.
# `kvloom.native` has the one that it calls, so that no other library is taken for it.
#
# To print it: cmake -P csrc/interface.cmake
file(GLOB sources "${CMAKE_CURRENT_LIST_DIR}/*.cpp")
list(SORT sources)
set(declared "")
foreach(source IN LISTS sources)
  file(READ "${source}" text)
  string(REPLACE ";" "@" text "${text}")  # which separates the items of a list
  string(REGEX REPLACE "//[^\n]*" "" text "${text}")
  string(REGEX MATCHALL "\nKVLOOM_API [^{]*{|\n(struct|enum) [^{]*{[^}]*}|\nconstexpr int(32|64)_t [^@]*@" found "${text}")
  list(APPEND declared ${found})
endforeach()
string(REGEX REPLACE "[ \n]+" " " declared "${declared}")
string(SHA256 INTERFACE "${declared}")
string(SUBSTRING "${INTERFACE}" 0 16 INTERFACE)
if(CMAKE_SCRIPT_MODE_FILE)
  message(NOTICE "${INTERFACE}")
else()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${sources})
endif()
