/* What the workload and the verifier see: mounts and their inits. */
#ifndef DAYFLY_SPACES_H
#define DAYFLY_SPACES_H

#include "files.h"

/* --- mounts of the workload -------------------------------------------------------------------------------- */

static int new_mount(const char *type, unsigned attributes, const char *const options[][2]) {
    int fs = (int)syscall(SYS_fsopen, type, FSOPEN_CLOEXEC), mounted = -1;
    for (int i = 0; fs >= 0 && options && options[i][0]; i++)
        if (syscall(SYS_fsconfig, fs, FSCONFIG_SET_STRING, options[i][0], options[i][1], 0) < 0) close_fd(&fs);
    if (fs >= 0 && syscall(SYS_fsconfig, fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0)
        mounted = (int)syscall(SYS_fsmount, fs, FSMOUNT_CLOEXEC, attributes);
    close_fd(&fs);
    return mounted;
}

static int clone_tree(const char *path) {
    return (int)syscall(SYS_open_tree, AT_FDCWD, path, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE);
}

static bool attach(int tree, const char *path) {
    return tree >= 0 && syscall(SYS_move_mount, tree, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_SYMLINKS) == 0;
}

/* Keep a path out of `changes`: it is a mount point of ours. */
static void note_made(const char *path) {
    if (g.made_count < 16) snprintf(g.made[g.made_count++], sizeof g.made[0], "%s", path + 1);
}

/* A real folder at `path`, whatever the image or an earlier boot on this disk has there. */
static void need_folder(const char *path) {
    struct stat st;
    if (lstat(path, &st) == 0 && S_ISDIR(st.st_mode)) return;
    unlink(path);
    if (mkdir(path, 0755) < 0 && errno != EEXIST) refuse_errno(path);
}

static void set_read_only(const char *path) {
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC};
    syscall(SYS_mount_setattr, AT_FDCWD, path, AT_RECURSIVE, &attributes, sizeof attributes);
}

static void mask(const char *path) {
    struct stat st;
    if (stat(path, &st) < 0) return;
    if (S_ISDIR(st.st_mode))
        attach(new_mount("tmpfs", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID, NULL), path);
    else
        mount("/dev/null", path, NULL, MS_BIND, NULL);
}

/* /proc of the caller's pid namespace, with what Docker hides and protects. `boot_id` is a mount of its own. */
static void mount_proc(int boot_id) {
    static const char *const masked[] = {"/proc/asound", "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
                                         "/proc/timer_list", "/proc/sched_debug", "/proc/scsi", "/proc/kallsyms", "/proc/kpageflags",
                                         "/proc/kpagecount", "/proc/kpagecgroup", "/proc/kmsg"};
    static const char *const protected[] = {"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger", "/proc/cmdline"};
    if (mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0) refuse_errno("/proc");
    attach(boot_id, "/proc/sys/kernel/random/boot_id");
    for (size_t i = 0; i < sizeof masked / sizeof *masked; i++) mask(masked[i]);
    for (size_t i = 0; i < sizeof protected / sizeof *protected; i++)
        if (mount(protected[i], protected[i], NULL, MS_BIND | MS_REC, NULL) == 0) set_read_only(protected[i]);
}

static const char *const devices[] = {"null", "zero", "full", "random", "urandom", "tty"};
enum { DEVICES = sizeof devices / sizeof *devices };

static void mount_dev(const int trees[DEVICES]) {
    static const char *const links[][2] = {{"/proc/self/fd", "/dev/fd"},   {"/proc/self/fd/0", "/dev/stdin"}, {"/proc/self/fd/1", "/dev/stdout"},
                                           {"/proc/self/fd/2", "/dev/stderr"}, {"pts/ptmx", "/dev/ptmx"}};
    char path[64], shm[64];
    if (mount("tmpfs", "/dev", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m") < 0) refuse_errno("/dev");
    for (int i = 0; i < DEVICES; i++) {
        snprintf(path, sizeof path, "/dev/%s", devices[i]);
        put_file(path, "");
        if (!attach(trees[i], path)) refuse_errno(path);
    }
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) symlink(links[i][0], links[i][1]);
    mkdir("/dev/pts", 0755);
    mkdir("/dev/shm", 01777);
    mkdir("/dev/mqueue", 0755);
    if (mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,gid=5") < 0) refuse_errno("/dev/pts");
    snprintf(shm, sizeof shm, "mode=1777,size=%lld", (long long)g.memory_limit / 2);
    if (mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, shm) < 0) refuse_errno("/dev/shm");
    mount("mqueue", "/dev/mqueue", "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
}

/* Mounted over the image's, as Docker does, so that the image's own files and `changes` stay as they are. */
static const char *const etc_files[] = {"hostname", "hosts", "resolv.conf", "machine-id"};
enum { ETC_FILES = sizeof etc_files / sizeof *etc_files };

/* Empty before the guest knows who it is; the mounts of them are made then, too. */
static void write_etc_files(void) {
    char text[512];
    put_file("/run/etc/resolv.conf", "");
    snprintf(text, sizeof text, "%s\n", g.hostname);
    put_file("/run/etc/hostname", text);
    snprintf(text, sizeof text, "127.0.0.1\tlocalhost %s\n::1\tlocalhost ip6-localhost ip6-loopback\n", g.hostname);
    put_file("/run/etc/hosts", text);
    snprintf(text, sizeof text, "%s\n", g.machine_id);
    put_file("/run/etc/machine-id", text);
    snprintf(text, sizeof text, "%s\n", g.boot_id);
    put_file("/run/etc/boot_id", text);
}

static void mount_etc(const int trees[ETC_FILES]) {
    char path[64];
    if (mkdir("/etc", 0755) < 0 && errno != EEXIST) return;
    for (int i = 0; i < ETC_FILES; i++) {
        snprintf(path, sizeof path, "/etc/%s", etc_files[i]);
        int fd = open(path, O_RDONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0644);
        if (fd >= 0) attach(trees[i], path);
        close_fd(&fd);
    }
}

static void init_loop(void) __attribute__((noreturn));
static void init_loop(void) {
    sigset_t set;
    syscall(SYS_close_range, 0, ~0u, 0);
    prctl(PR_SET_NAME, "init", 0, 0, 0);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, NULL);
    for (;;) {
        while (waitpid(-1, NULL, WNOHANG) > 0) {}
        sigwaitinfo(&set, NULL);
    }
}

/* What is mounted in the workload's space, made before its disk is known. */
struct world {
    int dev, proc, sys, etc[ETC_FILES];
};

/* Leave the agent's root for an empty one of our own, with the agent's below /old. Its /run stays shared: what is
 * mounted there later is there for both. */
static void enter_skeleton(void) {
    if (mount("tmpfs", "/skeleton", "tmpfs", MS_NODEV, "mode=755,size=64k") < 0 || chdir("/skeleton") < 0 || mkdir("old", 0755) < 0 || syscall(SYS_pivot_root, ".", "old") < 0 || chdir("/") < 0)
        refuse_errno("skeleton");
    mkdir("/dev", 0755);
    mkdir("/proc", 0755);
    mkdir("/sys", 0755);
}

static void make_world(struct world *w) {
    int device_trees[DEVICES];
    char path[64];
    for (int i = 0; i < DEVICES; i++) {
        snprintf(path, sizeof path, "/dev/%s", devices[i]);
        device_trees[i] = clone_tree(path);
    }
    for (int i = 0; i < ETC_FILES; i++) {
        snprintf(path, sizeof path, "/run/etc/%s", etc_files[i]);
        w->etc[i] = clone_tree(path);
    }
    int boot_id = clone_tree("/run/etc/boot_id");
    enter_skeleton();
    mount_dev(device_trees);
    mount_proc(boot_id);
    if (mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0) refuse_errno("/sys");
    mount("cgroup2", "/sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    set_read_only("/sys");
    mask("/sys/firmware");
    w->dev = clone_tree("/dev");
    w->proc = clone_tree("/proc");
    w->sys = clone_tree("/sys");
}

/* A little space that the workload cannot take: on a full disk the verifier's folders could not even be made, and a
 * later boot would find the overlay read-only. Given back when the workload has ended. */
#define BALLAST_NAME ".dayfly-ballast"
enum { BALLAST_SIZE = 1024 * 1024 };

static void reserve_space(int disk) {
    int fd = openat(disk, BALLAST_NAME, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return;
    if (fallocate(fd, 0, 0, BALLAST_SIZE) < 0) unlinkat(disk, BALLAST_NAME, 0);
    close(fd);
}

static void give_space_back(void) { unlink("/run/work/" BALLAST_NAME); }

/* What the kernel read of a blank disk before the template was saved (its partition table) it has dropped since: a
 * block device keeps no pages while nobody has it open. Returns the root of the writable disk when this is its first
 * use, else -1. */
static int mount_disks(void) {
    static const char *const options = "lowerdir=/old/run/base,upperdir=/old/run/work/upper,workdir=/old/run/work/work";
    struct stat st;
    char base[32], work[32];
    int first = -1;
    if (!g.base_disk[0] || !g.work_disk[0]) refuse("no_disk", "the VM has no disk named base or none named work");
    snprintf(base, sizeof base, "/old%s", g.base_disk);
    snprintf(work, sizeof work, "/old%s", g.work_disk);
    if (mount(base, "/old/run/base", "squashfs", MS_RDONLY | MS_NODEV, NULL) < 0 &&
        mount(base, "/old/run/base", "erofs", MS_RDONLY | MS_NODEV, NULL) < 0)
        refuse("bad_base_disk", "the image's disk cannot be mounted: %s", strerror(errno));
    if (mount(work, "/old/run/work", "ext4", MS_NODEV | MS_NOATIME, NULL) < 0)
        refuse("bad_work_disk", "the writable disk cannot be mounted: %s", strerror(errno));
    if (mkdir("/old/run/work/upper", 0755) < 0) {
        unlink("/old/run/work/" BALLAST_NAME); /* worked on before: what comes now is not the workload */
    } else {
        first = open("/old/run/work", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (stat("/old/run/base", &st) == 0 && chown("/old/run/work/upper", st.st_uid, st.st_gid) == 0)
            chmod("/old/run/work/upper", st.st_mode & 07777); /* it becomes the root: it must look like the image's */
    }
    mkdir("/old/run/work/work", 0755);
    if (mount("overlay", "/old/run/root", "overlay", MS_NODEV, options) < 0)
        refuse("bad_work_disk", "the overlay cannot be mounted: %s", strerror(errno));
    return first;
}

/* Make the overlay the root for good: after this no path of the agent can be named. Only then are
 * the image's own links followed. */
static void enter_image(const struct world *w) {
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 || chdir("/old/run/root") < 0 || syscall(SYS_pivot_root, ".", ".") < 0 ||
        umount2(".", MNT_DETACH) < 0 || chdir("/") < 0)
        refuse_errno("pivot_root");
    need_folder("/dev");
    need_folder("/proc");
    need_folder("/sys");
    if (!attach(w->dev, "/dev") || !attach(w->proc, "/proc") || !attach(w->sys, "/sys")) refuse_errno("mounts");
    mount_etc(w->etc);
}

/* A report that is not the last one: see `finish`. */
static void tell(const struct buffer *b) {
    struct buffer whole = {0};
    buffer_add(&whole, "+", 1);
    if (b->length > 0) buffer_add(&whole, b->data + b->start, b->length);
    write_all(status_fd, whole.data, whole.length);
    buffer_free(&whole);
}

/* The workload's init: makes its world and says under which pid the agent knows it; waits for the word that the disks
 * are there; mounts them, enters the image and says so; and then reaps. Its first half is part of a template, so that a fork need not do it. */
static void work_init(int go) {
    struct world world;
    struct buffer pid = {0}, none = {0};
    char self[32] = "", byte;
    if (setns(g.cgroups_ns, CLONE_NEWCGROUP) < 0) refuse_errno("cgroup namespace");
    if (readlink("/proc/self", self, sizeof self - 1) < 0) refuse_errno("/proc/self");
    umask(0);
    make_world(&world);
    add_text(&pid, "pid", self);
    tell(&pid);
    if (read(go, &byte, 1) != 1) _exit(1);
    int fresh_disk = mount_disks();
    enter_image(&world);
    umask(022);
    tell(&none);
    if (fresh_disk >= 0) reserve_space(fresh_disk);
    init_loop();
}

/* --- the verifier's space ------------------------------------------------------------------------------------ */

static void tell_planted(int out, const char *path) { write_all(out, path, strlen(path) + 1); }

/* Names below a folder that ought to be empty; a thousand are enough to know. */
static void tell_contents(int out, int fd, char *path, size_t length, int *left, int depth) {
    char **names = list_folder(fd, 100000);
    for (char **n = names; *n && *left > 0 && length + strlen(*n) + 2 < PATH_MAX; n++) {
        sprintf(path + length, "/%s", *n);
        (*left)--;
        tell_planted(out, path);
        int next = depth < 20 ? openat(fd, *n, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
        if (next >= 0) tell_contents(out, next, path, strlen(path), left, depth + 1);
        close_fd(&next);
        path[length] = 0;
    }
}

/* One component of a verifier's folder in the workload's view: a real folder, and a mount point.
 * As a mount point of its namespace the workload can neither rename nor remove nor replace it, so the path keeps
 * meaning what it means now for as long as the verifier runs. Returns the new mount. */
static int pin_component(int out, int at, const char *name, const char *path, bool last) {
    struct stat st;
    char aside[64];
    if (fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISDIR(st.st_mode)) {
        tell_planted(out, path);
        snprintf(aside, sizeof aside, ".planted-%lld", (long long)wall_ns());
        if (renameat(at, name, at, aside) < 0) refuse_errno(path);
    }
    if (mkdirat(at, name, 0755) < 0 && errno != EEXIST) refuse_errno(path);
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) refuse_errno(path);
    int tree;
    if (last) {
        char full[PATH_MAX];
        int left = 1000;
        snprintf(full, sizeof full, "%s", path);
        tell_contents(out, fd, full, strlen(full), &left, 0);
        static const char *const options[][2] = {{"mode", "555"}, {"size", "4k"}, {NULL, NULL}};
        tree = new_mount("tmpfs", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV, options);
    } else
        tree = (int)syscall(SYS_open_tree, fd, "", AT_EMPTY_PATH | AT_RECURSIVE | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (tree < 0 || syscall(SYS_move_mount, tree, "", fd, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH) < 0) refuse_errno(path);
    close(fd);
    return tree;
}

static void pin_folder(int out, const char *folder) {
    char path[PATH_MAX], name[NAME_MAX + 1];
    int at = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const char *rest = folder + 1;
    while (*rest) {
        size_t length = strcspn(rest, "/");
        if (length == 0 || length > NAME_MAX) refuse("bad_request", "bad folder %s", folder);
        memcpy(name, rest, length);
        name[length] = 0;
        rest += length;
        snprintf(path, sizeof path, "%.*s", (int)(rest - folder), folder);
        rest += *rest == '/';
        int next = pin_component(out, at, name, path, !*rest);
        close(at);
        at = next;
    }
    close(at);
}

/* Runs in the outer pid namespace; the agent takes the mount namespace over while we wait at the end. */
static void help_open_verifier(const struct fields *f, int in, int out) {
    struct span key, value;
    struct buffer none = {0};
    char folder[PATH_MAX], wait;
    int boot_id = -1;
    enter_mounts(WORK);
    umask(0);
    for (int round = 0; round < 2; round++) {
        if (round == 1) {
            if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) refuse_errno("mount namespace");
            boot_id = clone_tree("/proc/sys/kernel/random/boot_id");
            mount_proc(boot_id);
        }
        for (size_t at = 0; next_field(f, &at, &key, &value);) {
            if (!is_key(&key, "folder") || value.length < 2 || value.length >= sizeof folder || value.data[0] != '/') continue;
            memcpy(folder, value.data, value.length);
            folder[value.length] = 0;
            if (round == 0) {
                pin_folder(out, folder);
            } else {
                bool logs = !strcmp(folder, "/logs/verifier"); /* a verifier that runs as a named user writes here */
                if (mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, logs ? "mode=1777" : "mode=755") < 0) refuse_errno(folder);
            }
        }
    }
    close(out);
    read(in, &wait, 1);
    finish('+', &none);
}

#endif
