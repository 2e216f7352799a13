/* put, get, remove, changes: in helper processes only. */
#ifndef DAYFLY_FILES_H
#define DAYFLY_FILES_H

#include "program.h"
#include "sha256.h"

/* --- archives ------------------------------------------------------------------------------------------------
 * The same format in both directions; see PROTOCOL.md. Runs in helpers only. */

enum { A_END, A_FILE, A_DIR, A_LINK, A_SKIPPED };
enum { ENTRY = 28, PIECE = 12, MAX_DEPTH = 500 };
#define NOBODY UINT32_MAX /* owner not given */

struct entry {
    uint8_t kind;
    uint32_t mode, uid, gid;
    int64_t mtime_ns;
    char path[PATH_MAX], target[PATH_MAX];
};

struct archive {
    int fd;
    struct sha256 digest;
    uint64_t files, bytes;
    uint64_t max_files, max_bytes, max_file_bytes, max_depth; /* reading from the guest only */
    uint8_t *chunk, *read; /* CHUNK bytes each: one piece of a file; what came and is still to be parsed */
    size_t read_at, read_end;
    struct buffer out;
};

static void archive_start(struct archive *a, int fd) {
    memset(a, 0, sizeof *a);
    a->fd = fd;
    a->chunk = malloc(CHUNK);
    a->read = malloc(CHUNK);
    if (a->chunk == NULL || a->read == NULL) refuse("no_memory", "out of memory");
    sha256_start(&a->digest);
}

/* What both sides hash: kind, mode, path and target, but neither time nor owner. */
static void hash_entry(struct archive *a, const struct entry *e) {
    uint8_t head[9];
    size_t path = strlen(e->path), target = strlen(e->target);
    head[0] = e->kind;
    set_le(head + 1, e->mode, 4);
    set_le(head + 5, path, 2);
    set_le(head + 7, target, 2);
    sha256_add(&a->digest, head, 9);
    sha256_add(&a->digest, e->path, path);
    sha256_add(&a->digest, e->target, target);
}

/* --- reading an archive: put --- */

static void need(struct archive *a, void *data, size_t length) {
    uint8_t *to = data;
    while (length > 0) {
        if (a->read_at == a->read_end) {
            ssize_t n = read(a->fd, a->read, CHUNK);
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) refuse("broken_archive", "the archive ends in the middle");
            a->read_at = 0;
            a->read_end = (size_t)n;
        }
        size_t take = a->read_end - a->read_at < length ? a->read_end - a->read_at : length;
        memcpy(to, a->read + a->read_at, take);
        a->read_at += take;
        to += take;
        length -= take;
    }
}

static void read_entry(struct archive *a, struct entry *e) {
    uint8_t head[ENTRY];
    need(a, head, ENTRY);
    size_t path = get_le(head + 2, 2), target = get_le(head + 24, 2);
    if (path >= PATH_MAX || target >= PATH_MAX) refuse("limit", "a path is longer than %d bytes", PATH_MAX - 1);
    e->kind = head[0];
    e->mode = (uint32_t)get_le(head + 4, 4);
    e->uid = (uint32_t)get_le(head + 8, 4);
    e->gid = (uint32_t)get_le(head + 12, 4);
    e->mtime_ns = (int64_t)get_le(head + 16, 8);
    need(a, e->path, path);
    need(a, e->target, target);
    e->path[path] = e->target[target] = 0;
}

/* The folder that an entry goes to, each component a real folder (a link in between is refused, not followed). */
static int open_parent(int root, const char *path, const char **name) {
    int at = dup(root);
    const char *slash;
    while ((slash = strchr(path, '/')) != NULL) {
        char part[NAME_MAX + 1];
        size_t length = (size_t)(slash - path);
        if (length == 0 || length > NAME_MAX) refuse("limit", "a name in %s is empty or too long", path);
        memcpy(part, path, length);
        part[length] = 0;
        int next = openat(at, part, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (next < 0 && errno == ENOENT && mkdirat(at, part, 0755) == 0)
            next = openat(at, part, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        close(at);
        if (next < 0) refuse_errno(part);
        at = next;
        path = slash + 1;
    }
    *name = path;
    return at;
}

/* Make way for a file or link. A mount point (/etc/hosts) cannot be removed: it is then written in place. */
static bool clear_way(int at, const char *name) {
    if (unlinkat(at, name, 0) == 0 || errno == ENOENT) return true;
    if (errno == EBUSY) return false;
    if (errno == EISDIR) refuse("is_a_folder", "%s is a folder in the guest", name);
    refuse_errno(name);
}

/* Owner, mode and time of an open file, or of the link or folder `name` (then `fd` is its parent). Each call costs
 * as much as all the rest of a small file, so those that would change nothing are left out. */
static void set_owner_and_time(int fd, const char *name, const struct entry *e, const struct user *owner) {
    uid_t uid = e->uid == NOBODY ? owner->uid : e->uid;
    gid_t gid = e->gid == NOBODY ? owner->gid : e->gid;
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {e->mtime_ns / 1000000000, e->mtime_ns % 1000000000}};
    bool file = e->kind == A_FILE, chown = !g.plain && (uid != 0 || gid != 0 || !file);
    if (chown && fchownat(fd, file ? "" : name, uid, gid, AT_SYMLINK_NOFOLLOW | (file ? AT_EMPTY_PATH : 0)) < 0) refuse_errno(name);
    /* after chown, which clears the set-uid bits */
    if (file && (chown || e->mode & 07000) && fchmod(fd, e->mode & 07777) < 0) refuse_errno(name);
    if (e->kind == A_DIR && fchmodat(fd, name, e->mode & 07777, 0) < 0) refuse_errno(name);
    if ((file ? futimens(fd, times) : utimensat(fd, name, times, AT_SYMLINK_NOFOLLOW)) < 0) refuse_errno(name);
}

static void receive_content(struct archive *a, int fd, const char *name) {
    for (uint64_t end = 0;;) {
        uint8_t head[PIECE];
        need(a, head, PIECE);
        uint64_t offset = get_le(head, 8);
        uint32_t length = get_u32(head + 8);
        if (length > CHUNK || offset > INT64_MAX - CHUNK) refuse("broken_archive", "a piece of %s is out of bounds", name);
        need(a, a->chunk, length);
        sha256_add(&a->digest, head, PIECE);
        sha256_add(&a->digest, a->chunk, length);
        if (length == 0) {
            if (offset != end && ftruncate(fd, (off_t)offset) < 0) refuse_errno(name);
            a->bytes += offset;
            return;
        }
        for (size_t done = 0; done < length;) {
            ssize_t n = pwrite(fd, a->chunk + done, length - done, (off_t)(offset + done));
            if (n <= 0) refuse_errno(name);
            done += (size_t)n;
        }
        end = offset + length;
    }
}

static void receive_file(struct archive *a, int at, const char *name, const struct entry *e, const struct user *owner) {
    int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    int fd = openat(at, name, flags, e->mode & 0777);
    if (fd < 0 && errno == EEXIST) {
        bool gone = clear_way(at, name);
        fd = openat(at, name, gone ? flags : O_WRONLY | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, e->mode & 0777);
        if (fd >= 0 && !gone) fchmod(fd, e->mode & 0777);
    }
    if (fd < 0) refuse_errno(name);
    receive_content(a, fd, name);
    set_owner_and_time(fd, name, e, owner);
    if (close(fd) < 0) refuse_errno(name);
    a->files++;
}

static void receive_folder(int at, const char *name) {
    struct stat st;
    if (mkdirat(at, name, 0755) == 0) return;
    if (errno != EEXIST || fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) < 0) refuse_errno(name);
    if (S_ISDIR(st.st_mode)) return;
    if (!clear_way(at, name) || mkdirat(at, name, 0755) < 0) refuse_errno(name);
}

static void receive_entry(struct archive *a, int root, const struct entry *e, const struct user *owner) {
    const char *name;
    hash_entry(a, e);
    int at = open_parent(root, e->path, &name);
    if (!*name || !strcmp(name, ".") || !strcmp(name, "..")) refuse("broken_archive", "bad name in the archive");
    switch (e->kind) {
    case A_FILE: receive_file(a, at, name, e, owner); break;
    case A_DIR: receive_folder(at, name); break;
    case A_LINK:
        if (!clear_way(at, name) || symlinkat(e->target, at, name) < 0) refuse_errno(name);
        break;
    default: refuse("broken_archive", "unknown kind of entry in the archive");
    }
    if (e->kind == A_LINK) set_owner_and_time(at, name, e, owner);
    close(at);
}

/* The folder below which everything is put; it and its parents are made. Links in it are the image's own. */
static int open_destination(char *path) {
    make_folders(path);
    struct open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_NO_MAGICLINKS};
    int fd = (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
    if (fd < 0) refuse_errno(path);
    return fd;
}

static void finish_transfer(struct archive *a) __attribute__((noreturn));
static void finish_transfer(struct archive *a) {
    struct buffer b = {0};
    uint8_t digest[32];
    sha256_end(&a->digest, digest);
    add_number(&b, "files", (int64_t)a->files);
    add_number(&b, "bytes", (int64_t)a->bytes);
    add_field(&b, "digest", digest, 32);
    finish('+', &b);
}

/* Folders get their mode and time last: what is put into them would change the time. */
struct late {
    struct late *next;
    uint32_t mode, uid, gid;
    int64_t mtime_ns;
    char path[];
};

static struct late *remember_folder(struct late *rest, const struct entry *e) {
    struct late *late = malloc(sizeof *late + strlen(e->path) + 1);
    if (late == NULL) refuse("no_memory", "out of memory");
    *late = (struct late){rest, e->mode, e->uid, e->gid, e->mtime_ns};
    strcpy(late->path, e->path);
    return late;
}

static void finish_folders(int root, struct late *folders, struct entry *e, const struct user *owner) {
    for (; folders; folders = folders->next) {
        const char *name;
        *e = (struct entry){.kind = A_DIR, .mode = folders->mode, .uid = folders->uid, .gid = folders->gid, .mtime_ns = folders->mtime_ns};
        int at = open_parent(root, folders->path, &name);
        set_owner_and_time(at, name, e, owner);
        close(at);
    }
}

static void help_put(const struct fields *f, int in) {
    struct archive a;
    struct user owner;
    struct late *folders = NULL;
    char dest[PATH_MAX], user[256], space[8];
    if (!text_field(f, "dest", dest, sizeof dest)) refuse("bad_request", "bad destination");
    text_field(f, "user", user, sizeof user);
    text_field(f, "space", space, sizeof space);
    enter_mounts(!strcmp(space, "verify") ? VERIFY : WORK);
    if (g.plain) memset(&owner, 0, sizeof owner); else resolve_user(user, &owner);
    umask(0);
    archive_start(&a, in);
    int root = open_destination(dest);
    struct entry *e = malloc(sizeof *e);
    for (;;) {
        if (e == NULL) refuse("no_memory", "out of memory");
        read_entry(&a, e);
        if (e->kind == A_END) break;
        receive_entry(&a, root, e, &owner);
        if (e->kind == A_DIR) folders = remember_folder(folders, e);
    }
    finish_folders(root, folders, e, &owner);
    finish_transfer(&a);
}

/* --- writing an archive: get --- */

static void emit(struct archive *a, const void *data, size_t length) {
    buffer_add(&a->out, data, length);
    if (a->out.length < CHUNK) return;
    if (!write_all(a->fd, a->out.data + a->out.start, a->out.length)) _exit(1); /* nobody wants it any more */
    buffer_take(&a->out, a->out.length);
}

static void emit_entry(struct archive *a, const struct entry *e) {
    uint8_t head[ENTRY] = {e->kind};
    size_t path = strlen(e->path), target = strlen(e->target);
    set_le(head + 2, path, 2);
    set_le(head + 4, e->mode, 4);
    set_le(head + 8, e->uid, 4);
    set_le(head + 12, e->gid, 4);
    set_le(head + 16, (uint64_t)e->mtime_ns, 8);
    set_le(head + 24, target, 2);
    emit(a, head, ENTRY);
    emit(a, e->path, path);
    emit(a, e->target, target);
    if (e->kind != A_SKIPPED && e->kind != A_END && !(e->kind == A_DIR && !*e->path)) hash_entry(a, e);
}

static void emit_piece(struct archive *a, uint64_t offset, const void *data, size_t length) {
    uint8_t head[PIECE];
    set_le(head, offset, 8);
    set_le(head + 8, length, 4);
    emit(a, head, PIECE);
    emit(a, data, length);
    sha256_add(&a->digest, head, PIECE);
    sha256_add(&a->digest, data, length);
}

static bool all_zero(const uint8_t *p, size_t length) { return length == 0 || (p[0] == 0 && memcmp(p, p + 1, length - 1) == 0); }

/* Pieces are cut at multiples of CHUNK and left out when zero, so that the digest does not depend on how a file
 * system happened to lay the file out. The size is what it was at the start: a growing file ends somewhere. */
static void emit_content(struct archive *a, int fd, const struct stat *st, const char *path) {
    uint64_t size = (uint64_t)st->st_size, at = 0, limit = size ? size : 1024 * 1024; /* /proc says 0 */
    if (size > a->max_file_bytes || a->bytes + size > a->max_bytes)
        refuse("limit", "%s: over the limit of the transfer (%llu bytes a file, %llu in all)", path,
               (unsigned long long)a->max_file_bytes, (unsigned long long)a->max_bytes);
    while (at < limit) {
        off_t data = size ? lseek(fd, (off_t)at, SEEK_DATA) : -1;
        if (size && data < 0 && errno == ENXIO) break;
        if (data > (off_t)at) at = (uint64_t)data / CHUNK * CHUNK;
        if (at >= limit) break;
        size_t want = limit - at < CHUNK ? limit - at : CHUNK, have = 0;
        while (have < want) {
            ssize_t n = pread(fd, a->chunk + have, want - have, (off_t)(at + have));
            if (n < 0) refuse_errno(path);
            if (n == 0) break;
            have += (size_t)n;
        }
        if (have > 0 && !all_zero(a->chunk, have)) emit_piece(a, at, a->chunk, have);
        at += have;
        if (have < want) break;
    }
    uint64_t end = size ? size : at;
    a->bytes += end;
    emit_piece(a, end, "", 0);
}

static void fill_entry(struct entry *e, const struct stat *st, const char *path) {
    e->mode = st->st_mode & 07777;
    e->uid = st->st_uid;
    e->gid = st->st_gid;
    e->mtime_ns = (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec;
    e->target[0] = 0;
    snprintf(e->path, sizeof e->path, "%s", path);
}

static void count_entry(struct archive *a) {
    if (++a->files > a->max_files) refuse("limit", "more than %llu files and folders", (unsigned long long)a->max_files);
}

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* The names in a folder, sorted by bytes; NULL-terminated. */
static char **list_folder(int fd, uint64_t max) {
    DIR *dir = fdopendir(dup(fd));
    struct dirent *d;
    size_t count = 0, room = 64;
    char **names = malloc(room * sizeof *names);
    if (dir == NULL || names == NULL) refuse_errno("folder");
    rewinddir(dir);
    while ((d = readdir(dir)) != NULL) {
        if (!strcmp(d->d_name, ".") || !strcmp(d->d_name, "..")) continue;
        if (count > max) refuse("limit", "more than %llu names in one folder", (unsigned long long)max);
        if (count + 1 >= room) names = realloc(names, (room *= 2) * sizeof *names);
        if (names == NULL || (names[count++] = strdup(d->d_name)) == NULL) refuse("no_memory", "out of memory");
    }
    closedir(dir);
    names[count] = NULL;
    qsort(names, count, sizeof *names, by_name);
    return names;
}

/* Kernel interfaces are no files of the workload, and some never end. */
static bool is_kernel_fs(int fd) {
    struct statfs fs;
    if (fstatfs(fd, &fs) < 0) return true;
    switch ((unsigned long)fs.f_type) {
    case 0x9fa0: case 0x62656572: case 0x63677270: case 0x1cd1: case 0x19800202: return true; /* proc sys cgroup2 devpts mqueue */
    default: return false;
    }
}

static void emit_folder(struct archive *a, int fd, struct entry *e, size_t length, uint64_t depth);

static void emit_name(struct archive *a, int at, const char *name, struct entry *e, uint64_t depth) {
    struct stat st;
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s", e->path);
    if (fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) < 0) return; /* gone meanwhile */
    fill_entry(e, &st, path);
    e->kind = S_ISREG(st.st_mode) ? A_FILE : S_ISDIR(st.st_mode) ? A_DIR : S_ISLNK(st.st_mode) ? A_LINK : A_SKIPPED;
    if (e->kind == A_LINK) {
        ssize_t n = readlinkat(at, name, e->target, sizeof e->target - 1);
        if (n < 0) return;
        e->target[n] = 0;
        count_entry(a);
        emit_entry(a, e);
    } else if (e->kind == A_SKIPPED) {
        count_entry(a);
        emit_entry(a, e);
    } else {
        int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | (e->kind == A_DIR ? O_DIRECTORY : 0);
        int fd = openat(at, name, flags);
        if (fd < 0 && errno == ENOENT) return;
        if (fd < 0 || fstat(fd, &st) < 0) refuse_errno(path);
        bool same = e->kind == A_DIR ? S_ISDIR(st.st_mode) : S_ISREG(st.st_mode);
        if (!same || is_kernel_fs(fd)) e->kind = A_SKIPPED;
        count_entry(a);
        emit_entry(a, e);
        if (e->kind == A_FILE) emit_content(a, fd, &st, path);
        if (e->kind == A_DIR) emit_folder(a, fd, e, strlen(e->path), depth + 1);
        close(fd);
    }
}

static void emit_folder(struct archive *a, int fd, struct entry *e, size_t length, uint64_t depth) {
    if (depth > a->max_depth || depth > MAX_DEPTH) refuse("limit", "folders nested deeper than %llu", (unsigned long long)a->max_depth);
    char **names = list_folder(fd, a->max_files);
    for (char **name = names; *name; name++) {
        size_t more = strlen(*name) + 1;
        if (length + more >= PATH_MAX) refuse("limit", "a path is longer than %d bytes", PATH_MAX - 1);
        if (length) e->path[length] = '/';
        strcpy(e->path + length + (length > 0), *name);
        emit_name(a, fd, *name, e, depth);
        e->path[length] = 0;
        free(*name);
    }
    free(names);
}

static void help_get(const struct fields *f, int out) {
    struct archive a;
    struct entry *e = calloc(1, sizeof *e);
    struct stat st;
    char source[PATH_MAX], space[8];
    if (e == NULL || !text_field(f, "source", source, sizeof source)) refuse("bad_request", "bad source");
    text_field(f, "space", space, sizeof space);
    enter_mounts(!strcmp(space, "verify") ? VERIFY : WORK);
    set_limit(RLIMIT_NOFILE, 4096, 4096);
    archive_start(&a, out);
    a.max_files = (uint64_t)number_field(f, "max_files", 0);
    a.max_bytes = (uint64_t)number_field(f, "max_bytes", 0);
    a.max_file_bytes = (uint64_t)number_field(f, "max_file_bytes", 0);
    a.max_depth = (uint64_t)number_field(f, "max_depth", 0);
    struct open_how how = {.flags = O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, .resolve = RESOLVE_NO_MAGICLINKS};
    int fd = (int)syscall(SYS_openat2, AT_FDCWD, source, &how, sizeof how);
    if (fd < 0 || fstat(fd, &st) < 0) refuse_errno(source);
    if (!S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode)) refuse("not_a_file", "%s is neither a file nor a folder", source);
    fill_entry(e, &st, "");
    e->kind = S_ISDIR(st.st_mode) ? A_DIR : A_FILE;
    count_entry(&a);
    emit_entry(&a, e);
    if (e->kind == A_FILE) emit_content(&a, fd, &st, source);
    else emit_folder(&a, fd, e, 0, 1);
    fill_entry(e, &st, "");
    e->kind = A_END;
    emit_entry(&a, e);
    if (!write_all(out, a.out.data + a.out.start, a.out.length)) _exit(1);
    finish_transfer(&a);
}

/* --- remove, changes --------------------------------------------------------------------------------------- */

static void remove_tree(int at, const char *name, int depth) {
    struct stat st;
    if (unlinkat(at, name, 0) == 0 || errno == ENOENT) return;
    if (fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) < 0) return;
    if (!S_ISDIR(st.st_mode)) refuse_errno(name);
    if (depth > MAX_DEPTH) refuse("limit", "folders nested deeper than %d", MAX_DEPTH);
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) refuse_errno(name);
    char **names = list_folder(fd, UINT32_MAX);
    for (char **n = names; *n; n++) {
        remove_tree(fd, *n, depth + 1);
        free(*n);
    }
    free(names);
    close(fd);
    if (unlinkat(at, name, AT_REMOVEDIR) == 0 || errno == ENOENT) return;
    if (errno == EBUSY && depth == 0) return; /* a mount point, as the verifier's folders are: it is empty now */
    refuse_errno(name);
}

static void help_remove(const struct fields *f) {
    struct buffer none = {0};
    char path[PATH_MAX], space[8];
    if (!text_field(f, "path", path, sizeof path) || path[0] != '/') refuse("bad_request", "bad path");
    text_field(f, "space", space, sizeof space);
    enter_mounts(!strcmp(space, "verify") ? VERIFY : WORK);
    set_limit(RLIMIT_NOFILE, 4096, 4096);
    remove_tree(AT_FDCWD, path, 0);
    finish('+', &none);
}

struct walk {
    int out, base;
    uint64_t budget, left; /* bytes still to be hashed; entries still to be told */
    uint8_t *chunk;
};

static bool is_made(const char *path) {
    for (int i = 0; i < g.made_count; i++)
        if (strcmp(g.made[i], path) == 0) return true;
    return false;
}

/* Copied up only because something in it changed: the same folder as in the image. */
static bool is_same_folder(struct walk *w, int fd, const struct stat *st, const char *path) {
    struct stat old;
    char opaque[2] = "";
    return fstatat(w->base, path, &old, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(old.st_mode) && old.st_mode == st->st_mode &&
           old.st_uid == st->st_uid && old.st_gid == st->st_gid &&
           (fgetxattr(fd, "trusted.overlay.opaque", opaque, 1) != 1 || opaque[0] != 'y');
}

static bool hash_file(struct walk *w, int fd, uint64_t size, uint8_t digest[32]) {
    struct sha256 hash;
    if (size > w->budget) return false;
    w->budget -= size;
    sha256_start(&hash);
    for (uint64_t at = 0; at < size;) {
        ssize_t n = pread(fd, w->chunk, CHUNK, (off_t)at);
        if (n <= 0) return false;
        sha256_add(&hash, w->chunk, (size_t)n);
        at += (uint64_t)n;
    }
    sha256_end(&hash, digest);
    return true;
}

/* u8 kind, u8 hashed, u16 length of the path, u32 mode, uid, gid, u64 size, 32 bytes of digest, path */
static void tell_change(struct walk *w, char kind, const struct stat *st, const uint8_t *digest, const char *path) {
    uint8_t head[56] = {(uint8_t)kind, digest != NULL};
    set_le(head + 2, strlen(path), 2);
    set_le(head + 4, st->st_mode & 07777, 4);
    set_le(head + 8, st->st_uid, 4);
    set_le(head + 12, st->st_gid, 4);
    set_le(head + 16, kind == 'f' || kind == 'l' ? (uint64_t)st->st_size : 0, 8);
    if (digest) memcpy(head + 24, digest, 32);
    if (w->left-- == 0) refuse("limit", "too many changed paths");
    if (!write_all(w->out, head, sizeof head) || !write_all(w->out, path, strlen(path))) _exit(1);
}

static void tell_link(struct walk *w, int at, const char *name, const struct stat *st, const char *path) {
    char target[PATH_MAX];
    uint8_t digest[32];
    struct sha256 hash;
    ssize_t n = readlinkat(at, name, target, sizeof target);
    sha256_start(&hash);
    sha256_add(&hash, target, n > 0 ? (size_t)n : 0);
    sha256_end(&hash, digest);
    tell_change(w, 'l', st, digest, path);
}

static void walk_folder(struct walk *w, int fd, char *path, size_t length, int depth) {
    if (depth > MAX_DEPTH) refuse("limit", "folders nested deeper than %d", MAX_DEPTH);
    char **names = list_folder(fd, UINT32_MAX);
    for (char **n = names; *n; free(*n++)) {
        struct stat st;
        uint8_t digest[32];
        if (length + strlen(*n) + 2 >= PATH_MAX || fstatat(fd, *n, &st, AT_SYMLINK_NOFOLLOW) < 0) continue;
        sprintf(path + length, "%s%s", length ? "/" : "", *n);
        if (is_made(path) || (S_ISCHR(st.st_mode) && st.st_rdev == 0)) {
            if (!is_made(path)) tell_change(w, 'x', &st, NULL, path);
        } else if (S_ISLNK(st.st_mode)) {
            tell_link(w, fd, *n, &st, path);
        } else if (S_ISREG(st.st_mode)) {
            int file = openat(fd, *n, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
            bool hashed = file >= 0 && hash_file(w, file, (uint64_t)st.st_size, digest);
            tell_change(w, 'f', &st, hashed ? digest : NULL, path);
            close_fd(&file);
        } else if (S_ISDIR(st.st_mode)) {
            int next = openat(fd, *n, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            if (next < 0) refuse_errno(path);
            if (!is_same_folder(w, next, &st, path)) tell_change(w, 'd', &st, NULL, path);
            walk_folder(w, next, path, strlen(path), depth + 1);
            close(next);
        } else
            tell_change(w, 'o', &st, NULL, path);
        path[length] = 0;
    }
    free(names);
}

static void help_changes(const struct fields *f, int out) {
    struct walk w = {.out = out, .budget = (uint64_t)number_field(f, "budget", 0), .left = 500000};
    struct buffer none = {0};
    char path[PATH_MAX] = "";
    if (g.plain) finish('+', &none);
    set_limit(RLIMIT_NOFILE, 4096, 4096);
    int upper = open("/run/work/upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    w.base = open("/run/base", O_PATH | O_DIRECTORY | O_CLOEXEC);
    w.chunk = malloc(CHUNK);
    if (upper < 0 || w.base < 0 || w.chunk == NULL) refuse_errno("writable layer");
    walk_folder(&w, upper, path, 0, 0);
    finish('+', &none);
}

#endif
