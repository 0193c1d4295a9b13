package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// streamWatch follows the events of one controller and resumes where it was
// cut. No task may be told twice to have ended, except after a reset.
type streamWatch struct {
	load       *load
	controller int
	last       string             // id of the last event
	seen       map[int64]struct{} // tasks completed since the last reset
}

func (w *streamWatch) run(ctx context.Context) {
	w.seen = map[int64]struct{}{}
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	for ctx.Err() == nil {
		_ = w.follow(ctx, client)           // it resumes whatever ended it
		_ = wait(ctx, 300*time.Millisecond) // the loop looks at ctx
	}
}

func (w *streamWatch) follow(ctx context.Context, client *http.Client) error {
	// A frozen controller says nothing; a dead stream must be left one day.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	silence := time.AfterFunc(40*time.Second, cancel)
	defer silence.Stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, w.load.c.controllers[w.controller].url+"/api/v1/events?topics=tasks", nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+w.load.c.token)
	if w.last != "" {
		req.Header.Set("Last-Event-ID", w.last)
	}
	res, err := client.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("answer %d", res.StatusCode)
	}
	in := bufio.NewScanner(res.Body)
	var id, kind string
	for in.Scan() {
		line := in.Bytes()
		silence.Reset(40 * time.Second)
		switch {
		case len(line) == 0:
			id, kind = "", ""
		case bytes.HasPrefix(line, []byte("id: ")):
			id = string(line[4:])
		case bytes.HasPrefix(line, []byte("event: ")):
			kind = string(line[7:])
		case bytes.HasPrefix(line, []byte("data: ")):
			w.event(id, kind, line[6:])
		}
	}
	return in.Err()
}

func (w *streamWatch) event(id, kind string, data []byte) {
	if kind == "reset" {
		clear(w.seen)
		w.last = id
		return
	}
	if id != "" {
		if start, _, _ := strings.Cut(w.last, "-"); w.last != "" && !strings.HasPrefix(id, start+"-") {
			w.load.c.book.strange("the event stream of controller %d went from %s to %s without a reset", w.controller, w.last, id)
		}
		w.last = id
	}
	if kind != "task.completed" {
		return
	}
	var t answered
	if json.Unmarshal(data, &t) != nil {
		return // torn by the cut that ends the stream
	}
	n, err := strconv.ParseInt(t.ID, 10, 64)
	if err != nil {
		return
	}
	if _, twice := w.seen[n]; twice {
		w.load.c.book.strange("the event stream of controller %d told twice that task %d ended (event %s)", w.controller, n, id)
	}
	w.seen[n] = struct{}{}
}
