/* The only program of the test image: a handful of commands, static, so that the image needs no libc. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

static int cat(char **paths)
{
    char buffer[65536];
    for (; *paths; paths++) {
        int fd = open(*paths, O_RDONLY);
        if (fd < 0) {
            perror(*paths);
            return 1;
        }
        for (ssize_t n; (n = read(fd, buffer, sizeof buffer)) > 0;)
            if (write(1, buffer, n) != n)
                return 1;
        close(fd);
    }
    return 0;
}

static int list(const char *path)
{
    DIR *folder = opendir(path);
    if (!folder) {
        perror(path);
        return 1;
    }
    for (struct dirent *entry; (entry = readdir(folder));)
        if (entry->d_name[0] != '.')
            puts(entry->d_name);
    return 0;
}

static int random_hex(void)
{
    unsigned char bytes[32];
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes)
        return 1;
    for (unsigned i = 0; i < sizeof bytes; i++)
        printf("%02x", bytes[i]);
    return 0;
}

static int write_file(const char *path, long mib)
{
    static char block[1 << 20];
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (fd < 0) {
        perror(path);
        return 1;
    }
    memset(block, 'x', sizeof block);
    for (long left = mib << 20; left > 0;) {
        ssize_t n = write(fd, block, left < (long)sizeof block ? left : (long)sizeof block);
        if (n < 0) {
            perror("write");
            return 1;
        }
        left -= n;
    }
    if (fsync(fd)) {
        perror("fsync");
        return 1;
    }
    return 0;
}

static int processors(void)
{
    cpu_set_t set;
    sched_getaffinity(0, sizeof set, &set);
    printf("%d", CPU_COUNT(&set));
    return 0;
}

static int now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    printf("%lld.%09ld", (long long)time.tv_sec, time.tv_nsec);
    return 0;
}

int main(int argc, char **argv)
{
    const char *command = argc > 1 ? argv[1] : "true";
    if (!strcmp(command, "true"))
        return 0;
    if (!strcmp(command, "cat"))
        return cat(argv + 2);
    if (!strcmp(command, "list"))
        return list(argv[2]);
    if (!strcmp(command, "random"))
        return random_hex();
    if (!strcmp(command, "processors"))
        return processors();
    if (!strcmp(command, "now"))
        return now();
    if (!strcmp(command, "sleep"))
        return sleep(atoi(argv[2]));
    if (!strcmp(command, "fill"))
        return write_file(argv[2], atol(argv[3]));
    return 2;
}
