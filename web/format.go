package web

import (
	"fmt"
	"html/template"
	"math"
	"strconv"
	"strings"
	"time"
)

// Times are shown in UTC, so that two people who look at the same page can
// speak about it. static/app.js writes the relative ones in the same words.

const (
	stampLayout = "2006-01-02 15:04:05 UTC"
	minute      = time.Minute
	hour        = time.Hour
	day         = 24 * time.Hour
)

// took writes how long something lasted, precisely: 4 ms, 1.9 s, 2 min 11 s.
func took(d time.Duration) string {
	switch {
	case d < 0:
		return "0 ms"
	case d < time.Millisecond:
		return "< 1 ms"
	case d < time.Second:
		return strconv.FormatInt(d.Milliseconds(), 10) + " ms"
	case d < minute:
		return trimZero(d.Seconds(), 1) + " s"
	}
	return age(d)
}

// age writes how long ago or since when, in whole units: 12 s, 3 h 4 min.
func age(d time.Duration) string {
	two := func(big, small int64, bigUnit, smallUnit string) string {
		if small == 0 {
			return fmt.Sprintf("%d %s", big, bigUnit)
		}
		return fmt.Sprintf("%d %s %d %s", big, bigUnit, small, smallUnit)
	}
	s := int64(max(d, 0) / time.Second)
	switch {
	case s < 60:
		return fmt.Sprintf("%d s", s)
	case s < 3600:
		return two(s/60, s%60, "min", "s")
	case s < 86400:
		return two(s/3600, s%3600/60, "h", "min")
	}
	return two(s/86400, s%86400/3600, "d", "h")
}

// ago writes a moment of the past in one unit: now, 12 s ago, 4 min ago.
func ago(d time.Duration) string {
	switch {
	case d < 2*time.Second:
		return "now"
	case d < minute:
		return fmt.Sprintf("%d s ago", d/time.Second)
	case d < hour:
		return fmt.Sprintf("%d min ago", d/minute)
	case d < day:
		return fmt.Sprintf("%d h ago", d/hour)
	}
	return fmt.Sprintf("%d d ago", d/day)
}

// trimZero writes a number with at most that many decimals: 2, 1.9.
func trimZero(v float64, decimals int) string {
	scale := math.Pow10(decimals)
	return strconv.FormatFloat(math.Round(v*scale)/scale, 'f', -1, 64)
}

// size writes a number of bytes: 17 B, 1.4 kB, 3.9 GB.
func size(n int64) string {
	if n < 1000 {
		return fmt.Sprintf("%d B", n)
	}
	v, unit := float64(n), 0
	for v >= 1000 && unit < 4 {
		v, unit = v/1000, unit+1
	}
	digits := 1
	if v >= 10 {
		digits = 0
	}
	return trimZero(v, digits) + " " + [...]string{"B", "kB", "MB", "GB", "TB"}[unit]
}

// binarySize writes memory and disks as their makers do: 4 GiB.
func binarySize(n int64) string {
	v, unit := float64(n), 0
	for v >= 1024 && unit < 4 {
		v, unit = v/1024, unit+1
	}
	digits := 1
	if v >= 10 {
		digits = 0
	}
	return trimZero(v, digits) + " " + [...]string{"B", "KiB", "MiB", "GiB", "TiB"}[unit]
}

// count writes a number with thousands apart: 48,231.
func count[T int | int64 | uint64](n T) string {
	text := strconv.FormatInt(int64(n), 10)
	for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// percent writes a share so that 100 % means all of it.
func percent(part, whole int64) string {
	if whole == 0 {
		return "–"
	}
	v := 100 * float64(part) / float64(whole)
	if part < whole && v > 99.99 {
		v = 99.99
	}
	if v >= 10 && v < 99 {
		return trimZero(v, 0) + " %"
	}
	return trimZero(v, 2) + " %"
}

// plural writes a number with its word: 1 agent, 3 agents.
func plural[T int | int64](n T, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return count(n) + " " + word + "s"
}

// clockAt writes a moment as a time of the day, with the date when it is
// another day than now.
func clockAt(t, now time.Time) string {
	t, now = t.UTC(), now.UTC()
	if t.Truncate(day).Equal(now.Truncate(day)) {
		return t.Format("15:04:05")
	}
	if t.Year() == now.Year() {
		return t.Format("2 Jan 15:04:05")
	}
	return t.Format("2 Jan 2006 15:04")
}

// stampAt writes a moment to the millisecond, with the date when it is another
// day than now.
func stampAt(t, now time.Time) template.HTML {
	text := t.UTC().Format("15:04:05.000")
	if !t.UTC().Truncate(day).Equal(now.UTC().Truncate(day)) {
		text = t.UTC().Format("2 Jan 15:04:05")
	}
	return timeTag(t, "", text)
}

// timeTag makes a time element. mode says how app.js keeps it up to date:
// "ago", "since" or "" for fixed text.
func timeTag(t time.Time, mode, text string) template.HTML {
	if t.IsZero() {
		return "–"
	}
	t = t.UTC()
	var b strings.Builder
	b.WriteString(`<time datetime="` + t.Format("2006-01-02T15:04:05.000Z") + `" title="` + t.Format(stampLayout) + `"`)
	if mode != "" {
		b.WriteString(` data-t="` + mode + `"`)
	}
	b.WriteString(">" + template.HTMLEscapeString(text) + "</time>")
	return template.HTML(b.String()) //nolint:gosec // numbers of ours and escaped text
}
