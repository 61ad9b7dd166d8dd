// How ranks meet: a folder, in which each message is a file that is whole as soon as it is there.
#pragma once
#include "work.h"

// What a message says of itself.
struct Header {
    u32 kind, type, operation;
    int root;
    u64 count;
    bool operator==(const Header& other) const {
        return kind == other.kind && type == other.type && operation == other.operation &&
               root == other.root && count == other.count;
    }
};

bool is_there(const std::string& path);
// False when it cannot be written.
bool put(const std::string& path, const Header& header, const void* data, u64 bytes);
// False when it is not there.
bool get(const std::string& path, Header& header);
// What lies behind the header from a byte on. False when that much is not there.
bool get(const std::string& path, u64 from, void* to, u64 bytes);
void remove_file(const std::string& path);
bool make_folder(const std::string& path);
void remove_folder(const std::string& path);
// Of a new one, where folders for a while are.
std::string new_folder_name();
