//go:build !linux

package listener

import "net"

func usedFiles() int { return 0 }

func waitingAt(*net.Listener) (int, bool) { return 0, false }

func listenOverflows() (uint64, bool) { return 0, false }
