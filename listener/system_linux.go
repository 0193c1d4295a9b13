package listener

import (
	"bytes"
	"net"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// usedFiles gives the number of open descriptors of this process; 0 when it
// cannot be found out.
func usedFiles() int {
	dir, err := os.Open("/proc/self/fd")
	if err != nil {
		return 0
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return 0
	}
	return len(names) - 1 // the one that reads them
}

// waitingAt gives the number of connections that the kernel holds for ln.
func waitingAt(ln *net.Listener) (n int, ok bool) {
	if ln == nil {
		return 0, false
	}
	raw := rawOf(*ln)
	if raw == nil {
		return 0, false
	}
	var info *unix.TCPInfo
	var err error
	if raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) }) != nil || err != nil {
		return 0, false
	}
	return int(info.Unacked), true // what this field holds of a listening socket
}

// listenOverflows gives the kernel's count for this network namespace: the
// column of that name in the two lines, names and values, of TcpExt.
func listenOverflows() (uint64, bool) {
	b, err := os.ReadFile("/proc/net/netstat")
	if err != nil {
		return 0, false
	}
	var names [][]byte
	for line := range bytes.Lines(b) {
		fields := bytes.Fields(line)
		if len(fields) == 0 || string(fields[0]) != "TcpExt:" {
			continue
		}
		if names == nil {
			names = fields
			continue
		}
		for i, name := range names {
			if string(name) == "ListenOverflows" && i < len(fields) {
				n, err := strconv.ParseUint(string(fields[i]), 10, 64)
				return n, err == nil
			}
		}
	}
	return 0, false
}
