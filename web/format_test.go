package web

import (
	"encoding/json"
	"net/url"
	"testing"
	"time"

	"headgate/internal/kinds"
	"headgate/tasks"
)

func TestTimesAreWrittenInOneWay(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		d               time.Duration
		took, age, back string
	}{
		{0, "< 1 ms", "0 s", "now"},
		{4 * time.Millisecond, "4 ms", "0 s", "now"},
		{1900 * time.Millisecond, "1.9 s", "1 s", "now"},
		{12400 * time.Millisecond, "12.4 s", "12 s", "12 s ago"},
		{131 * time.Second, "2 min 11 s", "2 min 11 s", "2 min ago"},
		{3 * time.Hour, "3 h", "3 h", "3 h ago"},
		{292 * time.Hour, "12 d 4 h", "12 d 4 h", "12 d ago"},
		{-time.Second, "0 ms", "0 s", "now"},
	} {
		if took(c.d) != c.took || age(c.d) != c.age || ago(c.d) != c.back {
			t.Errorf("%s is written %q, %q, %q; want %q, %q, %q", c.d, took(c.d), age(c.d), ago(c.d), c.took, c.age, c.back)
		}
	}
}

func TestNumbersAreWrittenInOneWay(t *testing.T) {
	t.Parallel()
	for got, want := range map[string]string{
		count(7): "7", count(48231): "48,231", count(-1234567): "-1,234,567", size(17): "17 B", size(1400): "1.4 kB", size(3_900_000_000): "3.9 GB",
		binarySize(4 << 30): "4 GiB", percent(0, 0): "–", percent(99999, 100000): "99.99 %", percent(1, 1): "100 %", plural(1, "agent"): "1 agent", plural(2, "agent"): "2 agents",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestSentences(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"": "", "connection refused": "Connection refused.", "dns-1.example.org closed the connection": "dns-1.example.org closed the connection.",
		"192.0.2.1:7442 refuses": "192.0.2.1:7442 refuses.", "Already one.": "Already one.", "really?": "Really?",
	} {
		if got := sentence(in); got != want {
			t.Errorf("%q becomes %q, want %q", in, got, want)
		}
	}
}

// TestFormsMakeTheArgumentsOfEveryKind fills the fields of each kind from
// arguments and reads the same arguments back.
func TestFormsMakeTheArgumentsOfEveryKind(t *testing.T) {
	t.Parallel()
	s := readSchema(json.RawMessage(`{"type":"object","required":["n"],"additionalProperties":false,"properties":{
		"n":{"type":"integer","minimum":1,"maximum":9007199254740993},"s":{"type":"string","maxLength":5},"b":{"type":"boolean"},
		"e":{"type":"string","enum":["x","y"]},"o":{"type":"object"},"d":{"type":"number","default":1.50}}}`))
	values := fromArgs(url.Values{}, `{"n":9007199254740993,"s":"a\"b","b":false,"e":"y","o":{"k":[1]}}`)
	fields := fieldsOf(s, argPrefix, argsPointer, values)
	if fields[0].member != "n" || !fields[0].Required || fields[0].Max != "9007199254740993" {
		t.Errorf("the first field is %+v", fields[0])
	}
	text, good := object(fields)
	if want := `{"n":9007199254740993,"b":false,"d":1.50,"e":"y","o":{"k":[1]},"s":"a\"b"}`; text != want || !good {
		t.Errorf("arguments are %s (%v), want %s", text, good, want)
	}
	values.Set("arg.n", "ten")
	values.Set("arg.o", "{")
	fields = fieldsOf(s, argPrefix, argsPointer, values)
	if _, good := object(fields); good || fields[0].Error != "must be a number" {
		t.Errorf("a wrong number is not marked: %+v", fields[0])
	}
	for _, k := range kinds.Default().All() {
		sc := readSchema(k.Schema)
		if sc.Type != "object" {
			t.Errorf("the schema of %s is not read: %+v", k.Name, sc)
		}
	}
}

func TestFilterBox(t *testing.T) {
	t.Parallel()
	q := expand(url.Values{"q": {"state=new,completed label.tier=edge dns- x=y"}, "kind": {"core.echo"}}, taskQuery())
	want := url.Values{"q": {"dns- x=y"}, "state": {"new,completed"}, "label.tier": {"edge"}, "kind": {"core.echo"}}
	if q.Encode() != want.Encode() {
		t.Errorf("the box becomes %s, want %s", q.Encode(), want.Encode())
	}
	if got, want := boxText(q, taskQuery()), "kind=core.echo label.tier=edge state=new,completed dns- x=y"; got != want {
		t.Errorf("the box shows %q, want %q", got, want)
	}
}

func TestChartHasOneStepForEachSample(t *testing.T) {
	t.Parallel()
	var points []tasks.Point
	for i := range 1440 {
		raw, err := json.Marshal(tasks.MinutePoint{Completed: map[tasks.Outcome]int64{tasks.Succeeded: 2, tasks.Failed: 1}, RunP50: 20, RunP95: 300, RunP99: 2500})
		if err != nil {
			t.Fatal(err)
		}
		points = append(points, tasks.Point{At: time.Unix(int64(60*i), 0), Value: raw})
	}
	all := samples(points)
	if len(all) != chartSteps {
		t.Fatalf("%d steps, want %d", len(all), chartSteps)
	}
	c := newChart(all)
	if len(c.Bars) != chartSteps || c.Most != 30 || len(c.Rows) != chartRows || c.Marks[0] != "3 s" || c.Marks[len(c.Marks)-1] != "10 ms" {
		t.Errorf("chart: %d bars of at most %d, %d rows, marks %q", len(c.Bars), c.Most, len(c.Rows), c.Marks)
	}
	if newChart(nil) != nil || newChart(all[:1]) != nil {
		t.Error("a chart is drawn of nothing")
	}
	if quiet := newChart([]sample{{At: time.Unix(0, 0)}, {At: time.Unix(60, 0)}}); quiet == nil || quiet.Grid != "" || len(quiet.Bars) != 0 {
		t.Errorf("a quiet time gives %+v", quiet)
	}
}

func TestShellQuoting(t *testing.T) {
	t.Parallel()
	if got, want := quoteShell(`a'b"$(x)`), `'a'\''b"$(x)'`; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestLocalPathsOnly(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"/tasks?x=1": "/tasks?x=1", "//evil": "/", "https://evil": "/", "": "/", `/\evil`: "/", "/a\nb": "/",
		"/../other": "/", "/..//evil": "/", "/tasks/..": "/", "/%2e%2E/other": "/", "/.%2e/other": "/", "/./tasks": "/", "/%zz": "/", "/tasks/a..b?q=../x": "/tasks/a..b?q=../x",
	} {
		if got := localPath(in); got != want {
			t.Errorf("%q leads to %q, want %q", in, got, want)
		}
	}
}
