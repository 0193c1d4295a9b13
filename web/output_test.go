package web

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"html"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"
	"time"

	"headgate/tasks"
)

// Cases P45, P52.
func TestPaintKeepsColoursAndDropsTheRest(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, in, want string }{
		{"plain", "hello", "hello"},
		{"markup is text", `<script>alert("1")</script> & 'x'`, `&lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt; &amp; &#39;x&#39;`},
		{"colour", "\x1b[31mred\x1b[0m plain", `<span class="a31">red</span> plain`},
		{"bold and colour", "\x1b[1;36mx\x1b[22my", `<span class="a1 a36">x</span><span class="a36">y</span>`},
		{"bright is the same", "\x1b[92mx", `<span class="a32">x</span>`},
		{"grey", "\x1b[90mx\x1b[39my", `<span class="a90">x</span>y`},
		{"extended colours are skipped", "\x1b[38;5;31mx\x1b[38;2;1;1;1my", "xy"},
		{"background is skipped", "\x1b[41mx", "x"},
		{"cursor movement", "a\x1b[2Jb\x1b[10;10Hc\x1b[?25l", "abc"},
		{"title", "a\x1b]0;evil\x07b\x1b]2;more\x1b\\c", "abc"},
		{"hyperlink", "\x1b]8;;javascript:alert(1)\x07here\x1b]8;;\x07", "here"},
		{"unfinished title takes the line", "a\x1b]0;evil", "a"},
		{"device strings", "a\x1bPq#1\x1b\\b\x1b_x\x1b\\c", "abc"},
		{"charset", "a\x1b(Bb\x1b=c", "abc"},
		{"lone escape", "a\x1b", "a"},
		{"C1 CSI", "a\u009b31mb", `a<span class="a31">b</span>`},
		{"C1 others", "a\u0085b\u008dc", "abc"},
		{"controls", "a\x00\x08\x0bb\x7f", "ab"},
		{"tab", "a\tb", "a\tb"},
		{"carriage return starts anew", "10 %\r20 %\r30 %", "30 %"},
		{"trailing carriage return", "line\r", "line"},
		{"not UTF-8", "a\xffb", "a\uFFFDb"},
		{"direction overrides are made visible", "a\u202eb\u2066c\u200bd", "a\uFFFDb\uFFFDc\uFFFDd"},
		{"quotes in parameters", "\x1b[31\"onx=1mz", "nx=1mz"},
	} {
		var s sgr
		if got := string(paint(&s, []byte(c.in))); got != c.want {
			t.Errorf("%s: %q gives %q, want %q", c.name, c.in, got, c.want)
		}
	}
}

// allowedMarkup is all that paint may ever write beside escaped text.
var allowedMarkup = regexp.MustCompile(`</span>|<span class="(a1|a(31|32|33|34|35|36|90)|a1 a(31|32|33|34|35|36|90))">`)

func FuzzPaint(f *testing.F) {
	for _, s := range []string{"", "a\x1b[31mb", "\x1b]0;x\x07", "\x9b1m<b>", "\x1b[1;31;m\r\xff", "\x1b(\x1b[", "\u009d\u009c<"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		var s sgr
		out := string(paint(&s, line))
		rest := allowedMarkup.ReplaceAllString(out, "")
		if strings.ContainsAny(rest, "<>\"'") {
			t.Errorf("%q gives markup: %q", line, out)
		}
		for _, r := range html.UnescapeString(rest) {
			if r < 0x20 && r != '\t' || r >= 0x7f && r < 0xa0 || invisible(r) {
				t.Errorf("%q leaves %U", line, r)
			}
		}
		if again := uncode(s.code()); again != s {
			t.Errorf("state %+v becomes %+v in a cursor", s, again)
		}
	})
}

// fetchFrom serves chunks as the queue does.
func fetchFrom(chunks []tasks.OutputChunk) fetchOutput {
	return func(_ context.Context, _ tasks.ID, from, limit int) ([]tasks.OutputChunk, error) {
		var out []tasks.OutputChunk
		for _, c := range chunks {
			if c.Seq >= from && len(out) < limit {
				out = append(out, c)
			}
		}
		return out, nil
	}
}

func chunk(seq int, stream, text string) tasks.OutputChunk {
	return tasks.OutputChunk{Ref: tasks.Ref{ID: 1, Attempt: 1}, Seq: seq, Stream: stream, At: time.Unix(int64(seq), 0), Data: []byte(text)}
}

func window1(t *testing.T, chunks []tasks.OutputChunk, from cursor) window {
	t.Helper()
	w, err := readWindow(t.Context(), fetchFrom(chunks), 1, from)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func texts(lines []outLine) []string {
	var out []string
	for _, l := range lines {
		mark := ""
		if l.Open {
			mark = "~"
		}
		if l.Cut {
			mark += "…"
		}
		if l.Gap > 0 {
			mark += fmt.Sprintf("[%d missing]", l.Gap)
		}
		out = append(out, fmt.Sprintf("%d%s %s %s", l.N, mark, l.Stream[3:], l.HTML))
	}
	return out
}

func TestLinesOfTwoStreams(t *testing.T) {
	t.Parallel()
	chunks := []tasks.OutputChunk{chunk(0, "stdout", "one\ntw"), chunk(1, "stderr", "bad"), chunk(2, "stdout", "o\n\nend"), chunk(3, "stderr", "\n")}
	got := fmt.Sprint(texts(window1(t, chunks, cursor{}).Lines))
	if want := "[1 out one 2 out two 3 out  4 err bad 5~ out end]"; got != want {
		t.Errorf("lines are %s, want %s", got, want)
	}
}

// Cases P4.
func TestWhatIsMissingShowsAtItsPlace(t *testing.T) {
	t.Parallel()
	at := func(c tasks.OutputChunk, offset int64) tasks.OutputChunk { c.Offset = offset; return c }
	chunks := []tasks.OutputChunk{
		chunk(0, "stdout", "one\ntw"), chunk(1, "stderr", "bad"), at(chunk(2, "stdout", "ee\nfour\n"), 106),
		at(chunk(3, "stderr", ""), 10), at(chunk(4, "stderr", "end\n"), 10),
	}
	got := fmt.Sprint(texts(window1(t, chunks, cursor{}).Lines))
	if want := "[1 out one 2 out tw 3[100 missing] out  4 out ee 5 out four 6 err bad 7[7 missing] err  8 err end]"; got != want {
		t.Errorf("lines are %s, want %s", got, want)
	}
}

func TestFollowingGivesTheSameLines(t *testing.T) {
	t.Parallel()
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 7))
		var chunks []tasks.OutputChunk
		ends := map[string]int64{}
		for seq := range 1 + r.IntN(40) {
			var b strings.Builder
			for range r.IntN(4) {
				b.WriteString([]string{"a", "bb\n", "\n", "\x1b[31m", "\x1b[0m", "x\r", strings.Repeat("L", 9000), "tail"}[r.IntN(8)])
			}
			c := chunk(seq, []string{"stdout", "stderr"}[r.IntN(2)], b.String())
			if r.IntN(6) == 0 {
				ends[c.Stream] += 1 + r.Int64N(1000)
			}
			c.Offset = ends[c.Stream]
			ends[c.Stream] += int64(len(c.Data))
			chunks = append(chunks, c)
		}
		whole := texts(window1(t, chunks, cursor{}).Lines)
		var got []string
		var at cursor
		for n := 1; n <= len(chunks); n++ { // each time one chunk more has come
			text := at.String()
			at, _ = readCursor(text)
			w := window1(t, chunks[:n], at)
			for _, l := range w.Lines {
				if !l.Open || n == len(chunks) {
					got = append(got, texts([]outLine{l})...)
				}
			}
			at = w.Next
		}
		if fmt.Sprint(got) != fmt.Sprint(whole) {
			t.Fatalf("seed %d: followed\n%q\nat once\n%q", seed, got, whole)
		}
	}
}

func TestLongLinesAndLongOutputs(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", maxLineBytes+5)
	w := window1(t, []tasks.OutputChunk{chunk(0, "stdout", long[:10_000]), chunk(1, "stdout", long[10_000:]+"\nnext\n")}, cursor{})
	if len(w.Lines) != 2 || !w.Lines[0].Cut || len(w.Lines[0].HTML) != maxLineBytes || w.Lines[1].HTML != "next" {
		t.Errorf("a line that is too long gives %d lines", len(w.Lines))
	}

	var chunks []tasks.OutputChunk
	for seq := range 50 {
		chunks = append(chunks, chunk(seq, "stdout", strings.Repeat("l\n", 100)))
	}
	var all int
	var at cursor
	for range 10 {
		w := window1(t, chunks, at)
		if len(w.Lines) > windowLines {
			t.Fatalf("a window has %d lines", len(w.Lines))
		}
		all += len(w.Lines)
		if at = w.Next; !w.More {
			break
		}
	}
	if all != 5000 {
		t.Errorf("windows have %d lines in all, want 5000", all)
	}

	endless := []tasks.OutputChunk{chunk(0, "stdout", strings.Repeat("x", 64<<10))}
	for seq := 1; seq < 400; seq++ {
		endless = append(endless, chunk(seq, "stdout", string(endless[0].Data)))
	}
	w = window1(t, endless, cursor{})
	for range 100 {
		if !w.More {
			break
		}
		w = window1(t, endless, w.Next)
	}
	if w.More {
		t.Error("an endless line is never passed")
	}
}

func TestAnotherAttemptStartsTheOutputAnew(t *testing.T) {
	t.Parallel()
	w := window1(t, []tasks.OutputChunk{chunk(0, "stdout", "x\n")}, cursor{attempt: 2, line: 4})
	if !w.Reset || len(w.Lines) != 0 {
		t.Errorf("window is %+v", w)
	}
}

func TestBrokenCursorsAreRefused(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"x", "1-2", "1-2-3-4-5-6-7-8-9-10", "1-2-3-4-5-6-7-8-9-10-11-12-13", "-1-2-3-4-5-6-7-8-9-1-1-1", "1-2-3-4-5-6-7-8-9-1-1-99999999999999999999"} {
		if _, err := readCursor(text); err == nil {
			t.Errorf("%q is taken for a cursor", text)
		}
	}
}

func TestJSONIsShownAsItIs(t *testing.T) {
	t.Parallel()
	got := string(prettyJSON([]byte(`{"n":9007199254740993,"f":1.10e+2,"a<b":["\"x\":",{"k":"</pre>\u202e` + "\u202e" + `"}]}`)))
	for _, want := range []string{"9007199254740993", "1.10e+2", "<b>&#34;a&lt;b&#34;:</b>", "&lt;/pre&gt;", "\uFFFD"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is missing in %q", want, got)
		}
	}
	if strings.Contains(got, "\u202e") || strings.Contains(got, "</pre>") {
		t.Errorf("hostile text got through: %q", got)
	}
	if big := prettyJSON([]byte(`"` + strings.Repeat("x", 2*maxShownJSON) + `"`)); len(big) > maxShownJSON+100 {
		t.Errorf("%d bytes are shown", len(big))
	}
}

func FuzzPrettyJSON(f *testing.F) {
	f.Add([]byte(`{"a":[1,{"b":"<"}]}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		out := string(prettyJSON(raw))
		if rest := strings.NewReplacer("<b>", "", "</b>", "").Replace(out); strings.ContainsAny(rest, "<>\"'") {
			t.Errorf("%q gives markup: %q", raw, out)
		}
		var compact bytes.Buffer
		if json.Valid(raw) && json.Compact(&compact, raw) == nil && len(out) < 1000 && !strings.ContainsRune(out, '\uFFFD') && !strings.ContainsRune(string(raw), 0x7f) {
			text := html.UnescapeString(strings.NewReplacer("<b>", "", "</b>", "").Replace(out))
			var again bytes.Buffer
			if json.Compact(&again, []byte(text)) != nil || !bytes.Equal(compact.Bytes(), again.Bytes()) {
				t.Errorf("%q is shown as %q", raw, text)
			}
		}
	})
}
