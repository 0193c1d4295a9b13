package agent_test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"headgate/internal/agent/program"
)

// play is what the test binary does as a program that an agent runs.
func play(role string) {
	switch role {
	case "show":
		// The mark of the run is new each time.
		env := slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, program.MarkName+"=") })
		fmt.Printf("%q %q\n", os.Args[1:], env)
		fmt.Fprintln(os.Stderr, "on stderr")
	case "exit7":
		os.Exit(7)
	case "kill9":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	case "wait":
		fmt.Println("ready")
		select {} // until a signal
	case "ignore_term":
		signal.Ignore(syscall.SIGTERM)
		fmt.Println("ready")
		waitForEver()
	case "flood":
		flood(os.Stdout, floodBytes)
	case "small_flood":
		flood(os.Stdout, smallFloodBytes)
	case "grandchild":
		attr := &os.ProcAttr{Env: []string{roleEnv + "=wait"}, Files: []*os.File{nil, os.Stdout, os.Stderr}}
		if _, err := os.StartProcess(os.Args[0], os.Args[:1], attr); err != nil {
			panic(err)
		}
	case "append":
		appendID(os.Args[1])
	case "until_file":
		appendID(os.Args[1] + ".runs")
		fmt.Println("ready")
		for tick := time.Tick(5 * time.Millisecond); ; <-tick {
			if _, err := os.Stat(os.Args[1]); err == nil {
				return
			}
		}
	}
}

// appendID leaves a line for this run of the task.
func appendID(file string) {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err == nil {
		_, err = fmt.Fprintf(f, "%s\n", os.Getenv("HEADGATE_TASK_ID"))
	}
	if err != nil {
		panic(err)
	}
}

func waitForEver() {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGUSR1)
	<-c
}

const (
	floodBytes      = 50_000_000
	smallFloodBytes = 3_000_000
)

// flood prints numbered lines, n bytes in all.
func flood(w io.Writer, n int) {
	b := bufio.NewWriterSize(w, 10_000)
	for i, done := 0, 0; done < n; i++ {
		line := strconv.Itoa(i) + "\n"
		line = line[:min(len(line), n-done)]
		done += len(line)
		_, _ = b.WriteString(line)
	}
	_ = b.Flush()
}
