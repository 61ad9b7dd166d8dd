#include "message_files.h"
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <chrono>
#include <cstdlib>

static bool write_all(int file, const void* data, u64 bytes) {
    for (const char* at = static_cast<const char*>(data); bytes;) {
        const ssize_t written = write(file, at, bytes);
        if (written <= 0) return false;
        at += written;
        bytes -= u64(written);
    }
    return true;
}

static bool read_all(int file, void* to, u64 bytes, u64 from) {
    for (char* at = static_cast<char*>(to); bytes;) {
        const ssize_t taken = pread(file, at, bytes, off_t(from));
        if (taken <= 0) return false;
        at += taken;
        from += u64(taken);
        bytes -= u64(taken);
    }
    return true;
}

bool exists(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

bool write_message(const std::string& path, const Header& header, const void* data, u64 bytes) {
    const std::string unfinished = path + ".new";
    const int file = open(unfinished.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0) return false;
    const bool whole = write_all(file, &header, sizeof header) && write_all(file, data, bytes);
    return (close(file) == 0) & whole && rename(unfinished.c_str(), path.c_str()) == 0;
}

bool read_header(const std::string& path, Header& header) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    const bool whole = read_all(file, &header, sizeof header, 0);
    close(file);
    return whole;
}

bool read_data(const std::string& path, u64 from, void* to, u64 bytes) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    const bool whole = read_all(file, to, bytes, sizeof(Header) + from);
    close(file);
    return whole;
}

void remove_file(const std::string& path) { unlink(path.c_str()); }

bool make_folder(const std::string& path) {
    return mkdir(path.c_str(), 0700) == 0 || exists(path);
}

void remove_folder(const std::string& path) {
    if (DIR* folder = opendir(path.c_str())) {
        while (const dirent* entry = readdir(folder)) {
            if (entry->d_name[0] != '.') remove_file(path + "/" + entry->d_name);
        }
        closedir(folder);
    }
    rmdir(path.c_str());
}

std::string new_folder_name() {
    static u32 count = 0;
    const char* named = getenv("TMPDIR");
    const std::string within = named && *named ? named : exists("/dev/shm") ? "/dev/shm" : "/tmp";
    const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
    return within + "/narrows-nccl-" + std::to_string(getpid()) + "-" + std::to_string(now) + "-" +
           std::to_string(count++);
}
