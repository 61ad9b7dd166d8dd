// Messages between ranks: files in a shared folder, which are complete as soon as they exist.
#pragma once
#include "operation.h"

// Header of a message, which describes the call.
struct Header {
    u32 kind, type, operation;
    int root;
    u64 count;
    bool operator==(const Header& other) const {
        return kind == other.kind && type == other.type && operation == other.operation &&
               root == other.root && count == other.count;
    }
};

bool exists(const std::string& path);
// Writes a message; false when it cannot be written.
bool write_message(const std::string& path, const Header& header, const void* data, u64 bytes);
// Reads the header of a message; false when the message does not exist.
bool read_header(const std::string& path, Header& header);
// Reads part of the data of a message; false when it is too short.
bool read_data(const std::string& path, u64 from, void* to, u64 bytes);
void remove_file(const std::string& path);
bool make_folder(const std::string& path);
void remove_folder(const std::string& path);
// A unique name in the folder for temporary files.
std::string new_folder_name();
