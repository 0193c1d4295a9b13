package handlers_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"headgate/handlers"
	"headgate/internal/auth"
	"headgate/tasks"
)

// printing is a task in the slot of alpha that prints what the test says.
type printing struct {
	t   *testing.T
	rig *rig
	id  string
	ref tasks.Ref
	seq int
	end map[string]int64
}

func startPrinting(t *testing.T, rig *rig) (p *printing, finish func()) {
	t.Helper()
	release := rig.agents.hold()
	t.Cleanup(release)
	id := submit(t, rig, `{"agent":"alpha","kind":"core.echo"}`).ID
	n, err := strconv.ParseInt(id, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	p = &printing{t: t, rig: rig, id: id, ref: tasks.Ref{ID: tasks.ID(n), Attempt: 1}, end: map[string]int64{}}
	for decode[task](t, rig.do(t, "GET", "/api/v1/tasks/"+id, "", auth.Viewer, nil), http.StatusOK).Attempt == 0 { //nolint:revive // it is about to start
	}
	return p, release
}

func (p *printing) path() string { return "/api/v1/tasks/" + p.id + "/output" }

// print prints after leaving out skip bytes.
func (p *printing) print(stream, text string, skip int64) {
	p.t.Helper()
	agent, err := p.rig.fleet.Lookup("alpha")
	if err != nil {
		p.t.Fatal(err)
	}
	p.end[stream] += skip
	p.rig.manager.Output(agent.Num, tasks.OutputChunk{
		Ref: p.ref, Seq: p.seq, Stream: stream, Offset: p.end[stream], At: time.Now(), Data: []byte(text),
	})
	for {
		f, err := p.rig.service.OutputFacts(p.t.Context(), p.ref.ID)
		if err != nil {
			p.t.Fatal(err)
		}
		if f.Attempt > 0 && f.LastSeq == p.seq {
			break // stored, so that the next one may come
		}
	}
	p.seq++
	p.end[stream] += int64(len(text))
	p.rig.agents.printed.Add(skip + int64(len(text)))
}

type outputBody struct {
	Output *handlers.OutputBody `json:"output"`
}

// Cases P22, P47.
func TestADownloadSaysWhatItLeavesOut(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	p, finish := startPrinting(t, rig)
	p.print("stdout", "beginning", 0)
	p.print("stderr", "warn", 0)
	p.print("stdout", "end", 1000)
	finish()
	await(t, rig, p.id)
	for stream, want := range map[string]struct {
		text    string
		missing int
	}{"": {"beginningwarnend", 1000}, "?stream=stdout": {"beginningend", 1000}, "?stream=stderr": {"warn", 0}} {
		res := rig.do(t, "GET", p.path()+stream, "", auth.Viewer, nil)
		got := readBody(t, res)
		if got != want.text || res.Header.Get("Output-Missing-Bytes") != strconv.Itoa(want.missing) || res.Header.Get("Output-Printed-Bytes") != strconv.Itoa(len(got)+want.missing) {
			t.Errorf("%s: %q, %v", stream, got, res.Header)
		}
		head := rig.do(t, "HEAD", p.path()+stream, "", auth.Viewer, nil)
		if head.ContentLength != int64(len(got)) || head.Header.Get("Etag") == "" || head.Header.Get("Accept-Ranges") != "bytes" {
			t.Errorf("%s: HEAD says %v", stream, head.Header)
		}
		if same := rig.do(t, "GET", p.path()+stream, "", auth.Viewer, map[string]string{"If-None-Match": head.Header.Get("Etag")}); same.StatusCode != http.StatusNotModified {
			t.Errorf("%s: the same again is %d", stream, same.StatusCode)
		}
	}
	body := decode[outputBody](t, rig.do(t, "GET", "/api/v1/tasks/"+p.id, "", auth.Viewer, nil), http.StatusOK)
	want := `{"attempt":1,"bytes":1016,"stored_bytes":16,"truncated":true,"stdout":{"bytes":1012,"stored_bytes":12},"stderr":{"bytes":4,"stored_bytes":4},"gaps":[{"stream":"stdout","offset":9,"bytes":1000}]}`
	if got, _ := json.Marshal(body.Output); string(got) != want {
		t.Errorf("output is %s, want %s", got, want)
	}
	list := decode[struct {
		Items []outputBody `json:"items"`
	}](t, rig.do(t, "GET", "/api/v1/tasks", "", auth.Viewer, nil), http.StatusOK)
	if len(list.Items) != 1 || list.Items[0].Output != nil {
		t.Errorf("a list tells of output: %+v", list)
	}
}

// Cases P47.
func TestEveryRangeOfAnOutputIsServed(t *testing.T) {
	t.Parallel()
	rig := newRig(t)
	p, finish := startPrinting(t, rig)
	var whole strings.Builder
	for i := range 40 {
		text := fmt.Sprintf("%d,", i)
		whole.WriteString(text)
		p.print([]string{"stdout", "stderr"}[i%2], text, 0)
	}
	finish()
	await(t, rig, p.id)
	all := whole.String()
	for from := range len(all) {
		res := rig.do(t, "GET", p.path(), "", auth.Viewer, map[string]string{"Range": fmt.Sprintf("bytes=%d-%d", from, from+4)})
		want := all[from:min(from+5, len(all))]
		if got := readBody(t, res); got != want || res.StatusCode != http.StatusPartialContent ||
			res.Header.Get("Content-Range") != fmt.Sprintf("bytes %d-%d/%d", from, from+len(want)-1, len(all)) {
			t.Fatalf("from %d: %d %q, %s", from, res.StatusCode, got, res.Header.Get("Content-Range"))
		}
	}
	for _, odd := range []string{"bytes=0-1,4-5", "lines=0-1", "bytes=5-2", "bytes=-", "bytes=x-1", "bytes=-0"} {
		if res := rig.do(t, "GET", p.path(), "", auth.Viewer, map[string]string{"Range": odd}); res.StatusCode != http.StatusOK || readBody(t, res) != all {
			t.Errorf("%s: %d", odd, res.StatusCode)
		}
	}
	res := rig.do(t, "GET", p.path(), "", auth.Viewer, map[string]string{"Range": "bytes=1000-"})
	if res.StatusCode != http.StatusRequestedRangeNotSatisfiable || res.Header.Get("Content-Range") != fmt.Sprintf("bytes */%d", len(all)) {
		t.Errorf("behind the end: %d, %q", res.StatusCode, res.Header.Get("Content-Range"))
	}
	_, _ = io.Copy(io.Discard, res.Body)
}

type outputEvent = handlers.OutputEventBody

// Cases P50, P51.
func TestOutputIsFollowedWithoutAGapOrARepetition(t *testing.T) {
	t.Parallel()
	rig := newRig(t, func(c *handlers.Config) { c.Heartbeat = 50 * time.Millisecond })
	server := serve(t, rig)
	p, finish := startPrinting(t, rig)
	token := rig.tokens[auth.Viewer]
	first := openStream(t, server, p.path()+"/events", token, nil)
	for name, want := range map[string]string{"Content-Type": "text/event-stream", "Cache-Control": "no-store, no-transform", "X-Accel-Buffering": "no"} {
		if got := first.res.Header.Get(name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	first.want("hello")
	p.print("stdout", "one", 0)
	if o, _ := first.outputPast(); string(o.Bytes) != "one" || o.Offset != 0 || o.Stream != "stdout" {
		t.Errorf("got %+v", o)
	}
	p.print("stderr", "\x82\xff\x00", 0)
	o, last := first.outputPast()
	if string(o.Bytes) != "\x82\xff\x00" || o.Stream != "stderr" {
		t.Errorf("got %+v", o)
	}
	first.cancel()
	p.print("stdout", "two", 5)
	again := openStream(t, server, p.path()+"/events", token, map[string]string{"Last-Event-ID": last})
	again.want("hello")
	if o, _ := again.outputPast(); string(o.Bytes) != "two" || o.Offset != 8 {
		t.Errorf("after the break: %+v", o)
	}
	finish()
	for e, ok := again.next(); ; e, ok = again.next() {
		if !ok {
			t.Fatal("the stream ends without a word")
		}
		if e.name == "end" {
			if e.data != `{"outcome":"succeeded","printed_bytes":14,"missing_bytes":5}` {
				t.Errorf("end says %s", e.data)
			}
			break
		}
		if e.name != "comment" && e.name != "" {
			t.Errorf("after the last chunk: %+v", e)
		}
	}
	if _, ok := again.next(); ok {
		t.Error("something follows the end")
	}
	whole := openStream(t, server, p.path()+"/events?stream=stdout", token, nil)
	whole.want("hello")
	var text string
	for e, ok := whole.next(); ok && e.name == "output"; e, ok = whole.next() {
		var body outputEvent
		_ = json.Unmarshal([]byte(e.data), &body)
		text += string(body.Bytes)
	}
	if text != "onetwo" {
		t.Errorf("stdout afterwards is %q", text)
	}
	if p := readProblem(t, rig.do(t, "GET", p.path()+"/events?last_event_id=x", "", auth.Viewer, nil)); p.Status != 400 {
		t.Errorf("a place that is none: %+v", p)
	}
}

// outputPast gives the next output, past heartbeats.
func (s *stream) outputPast() (outputEvent, string) {
	s.t.Helper()
	for {
		e, ok := s.next()
		if !ok {
			s.t.Fatal("the stream has ended")
		}
		if e.name == "output" {
			var body outputEvent
			if err := json.Unmarshal([]byte(e.data), &body); err != nil {
				s.t.Fatal(err)
			}
			return body, e.id
		}
	}
}
