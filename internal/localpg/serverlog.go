package localpg

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"sync"
)

const (
	// tailLines is how much of the server's log an exit error quotes.
	tailLines = 6
	// maxLine cuts a line of the server's log, which may quote a statement of
	// any length.
	maxLine = 2000
)

// serverLog passes the server's log on to slog line by line and keeps the last
// lines that tell why it ended.
type serverLog struct {
	logger *slog.Logger

	mu   sync.Mutex // guards what follows; two pipes may write
	part []byte     // an unfinished line, at most maxLine bytes
	last []string
}

func newServerLog(logger *slog.Logger) *serverLog {
	return &serverLog{logger: logger.With("component", "postgres")}
}

// Write takes a piece of the log; it never fails, the server must not suffer.
func (l *serverLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(b)
	for {
		line, rest, found := bytes.Cut(b, []byte("\n"))
		if room := maxLine - len(l.part); len(line) > room {
			line = line[:room]
		}
		l.part = append(l.part, line...)
		if !found {
			return n, nil
		}
		l.line(string(l.part))
		l.part, b = l.part[:0], rest
	}
}

func (l *serverLog) line(text string) {
	level, why := severity(text)
	if why {
		if len(l.last) == tailLines {
			l.last = append(l.last[:0], l.last[1:]...)
		}
		l.last = append(l.last, text)
	}
	l.logger.Log(context.Background(), level, text)
}

// tail gives the last lines that may tell why the server ended.
func (l *serverLog) tail() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.last, "; ")
}

// severity reads "[123] FATAL:  text". Errors of statements, and the lines
// that quote them, are the client's to report and may hold data: they go to
// debug and never into an error of ours.
func severity(line string) (level slog.Level, why bool) {
	rest := line
	if _, after, ok := strings.Cut(line, "] "); ok {
		rest = after
	}
	word, _, _ := strings.Cut(rest, ":")
	switch word {
	case "PANIC":
		return slog.LevelError, true
	case "FATAL": // of one session, unless the server's end follows
		return slog.LevelInfo, true
	case "WARNING":
		return slog.LevelWarn, false
	case "LOG", "HINT":
		return slog.LevelDebug, true
	}
	return slog.LevelDebug, false
}
