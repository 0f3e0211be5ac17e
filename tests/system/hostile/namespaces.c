/* Namespaces, mounts and cgroups: ways out of the cell. */
#include "hostile.h"

#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>

/* WAY ARGUMENT...: as root of user and mount namespaces of one's own */
static void do_as_root(int argc, char **argv)
{
	char map[64];
	uid_t uid = geteuid();
	gid_t gid = getegid();

	if (unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWIPC) < 0) {
		tell_step("unshare", -1);
		return;
	}
	put("/proc/self/setgroups", 0, "deny");
	snprintf(map, sizeof map, "0 %u 1", uid);
	if (put("/proc/self/uid_map", 0, map) < 0) {
		tell_step("uid_map", -1);
		return;
	}
	snprintf(map, sizeof map, "0 %u 1", gid);
	put("/proc/self/gid_map", 0, map);
	run(argc, argv);
}

/* TYPE SOURCE TARGET [FLAGS] */
static void do_mount(int argc, char **argv)
{
	unsigned long flags = 0;

	for (int i = 3; i < argc; i++) {
		flags |= !strcmp(argv[i], "bind") ? MS_BIND : 0;
		flags |= !strcmp(argv[i], "remount") ? MS_REMOUNT : 0;
		flags |= !strcmp(argv[i], "rec") ? MS_REC : 0;
		flags |= !strcmp(argv[i], "shared") ? MS_SHARED : 0;
	}
	mkdir(argv[2], 0777);
	tell_result(mount(argv[1], argv[2], argv[0], flags, NULL));
}

static void do_umount(int argc, char **argv)
{
	(void)argc;
	tell_result(umount2(argv[0], MNT_DETACH));
}

/* The directory of its own cgroup, and everything one might do with it. */
static void do_cgroup(int argc, char **argv)
{
	(void)argc;
	(void)argv;
	mkdir("/tmp/cgroup", 0777);
	if (tell_step("mount", mount("none", "/tmp/cgroup", "cgroup2", 0, NULL)) < 0)
		return;
	tell_step("list", open("/tmp/cgroup", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
	tell_step("mkdir", mkdir("/tmp/cgroup/own", 0777));
	tell_step("procs", put("/tmp/cgroup/cgroup.procs", 0, "0\n"));
	tell_step("threads", put("/tmp/cgroup/cgroup.threads", 0, "0\n"));
	tell_step("kill", put("/tmp/cgroup/cgroup.kill", 0, "1\n"));
	tell_step("freeze", put("/tmp/cgroup/cgroup.freeze", 0, "1\n"));
	tell_step("above", put("/tmp/cgroup/../cgroup.procs", 0, "0\n"));
}

/* PATH: a process made in another cgroup */
static void do_clone_into(int argc, char **argv)
{
	struct {
		unsigned long long flags, pidfd, child_tid, parent_tid, exit_signal, stack,
			stack_size, tls, set_tid, set_tid_size, cgroup;
	} arguments = {.flags = 0x200000000ULL, .exit_signal = SIGCHLD};
	int fd = open(argv[0], O_PATH | O_DIRECTORY | O_CLOEXEC);
	long pid;

	(void)argc;
	if (tell_step("open", fd) < 0)
		return;
	arguments.cgroup = (unsigned long long)fd;
	pid = syscall(SYS_clone3, &arguments, sizeof arguments);
	if (pid == 0)
		_exit(0);
	tell_step("clone", pid);
}

/* PATH: of a namespace */
static void do_setns(int argc, char **argv)
{
	int fd = open(argv[0], O_RDONLY | O_CLOEXEC);

	(void)argc;
	if (tell_step("open", fd) >= 0)
		tell_step("setns", setns(fd, 0));
}

static void do_chroot(int argc, char **argv)
{
	(void)argc;
	if (tell_step("chroot", chroot(argv[0])) == 0)
		tell_step("open", open("../../../../../../etc/shadow", O_RDONLY));
}

/*
 * PATH INODE: opens a directory of PATH's filesystem by its number, past all
 * names (open_by_handle_at(2))
 */
static void do_handle(int argc, char **argv)
{
	char space[sizeof(struct file_handle) + MAX_HANDLE_SZ];
	struct file_handle *handle = (struct file_handle *)space;
	unsigned long long inode = strtoull(argv[1], NULL, 10);
	unsigned *words = (unsigned *)handle->f_handle;
	int mount_id, root;

	(void)argc;
	handle->handle_bytes = MAX_HANDLE_SZ;
	if (tell_step("name", name_to_handle_at(AT_FDCWD, argv[0], handle, &mount_id, 0)) < 0)
		return;
	root = open(argv[0], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	words[0] = (unsigned)(inode >> 32);
	words[1] = (unsigned)inode;
	tell_step("directory", open_by_handle_at(root, handle, O_RDONLY | O_DIRECTORY));
	tell_step("file", open_by_handle_at(root, handle, O_RDONLY));
}

/* A FILE DIRECTORY that changes places with LINK as long as this process lives. */
static void do_swap(int argc, char **argv)
{
	alarm(0);
	(void)argc;
	if (fork() == 0) {
		for (;;)
			renameat2(AT_FDCWD, argv[0], AT_FDCWD, argv[1], RENAME_EXCHANGE);
	}
	tell("ok");
}

const struct way NAMESPACE_WAYS[] = {
	{"as-root", 1, do_as_root}, {"mount", 3, do_mount}, {"umount", 1, do_umount},
	{"cgroup", 0, do_cgroup}, {"clone-into", 1, do_clone_into}, {"setns", 1, do_setns},
	{"chroot", 1, do_chroot}, {"handle", 2, do_handle}, {"swap", 2, do_swap},
	{NULL, 0, NULL},
};
