package web

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// sample is one step of the chart.
type sample struct {
	At        time.Time // its end
	Completed int64
	Failed    int64 // of these, all that did not succeed
	RunTime   quantiles
}

type quantiles struct{ P50, P95, P99 time.Duration }

// chart is two pictures over the same time: run time on a logarithmic scale,
// and how many tasks ended. SVG without text; the labels are HTML, a sentence
// describes it, and a table holds the same numbers.
type chart struct {
	Label   string
	Latest  quantiles
	P50     string // points of the lines
	P95     string
	P99     string
	Grid    string // path
	Marks   []string
	Hours   []string
	Bars    []bar
	Most    int64 // tallest bar
	Rows    []sample
	BarText string
}

type bar struct {
	X, W           string
	Y, H           string
	FailY, FailH   string
	HasFail, HasOK bool
}

const (
	chartWidth  = 960.0
	chartHeight = 176.0
	barsHeight  = 48.0
	chartRows   = 12 // of the table twin
)

// newChart draws the series; nil when there is too little to draw.
func newChart(series []sample) *chart {
	if len(series) < 2 {
		return nil
	}
	c := &chart{Latest: latest(series)}
	low, high := bounds(series)
	if high > 0 {
		c.P50 = line(series, low, high, func(q quantiles) time.Duration { return q.P50 })
		c.P95 = line(series, low, high, func(q quantiles) time.Duration { return q.P95 })
		c.P99 = line(series, low, high, func(q quantiles) time.Duration { return q.P99 })
		c.Marks, c.Grid = scale(low, high)
	}
	c.bars(series)
	c.Hours = hours(series)
	c.Rows = pick(series, chartRows)
	c.Label = label(series, c)
	return c
}

func latest(series []sample) quantiles {
	for _, s := range slices.Backward(series) {
		if s.RunTime.P50 > 0 {
			return s.RunTime
		}
	}
	return quantiles{}
}

// bounds gives the decades that hold all values.
func bounds(series []sample) (low, high float64) {
	least, most := math.Inf(1), 0.0
	for _, s := range series {
		if s.RunTime.P50 > 0 {
			least, most = min(least, s.RunTime.P50.Seconds()), max(most, s.RunTime.P99.Seconds(), s.RunTime.P50.Seconds())
		}
	}
	if most == 0 {
		return 0, 0
	}
	// Half decades: 1, 3, 10, 30.
	low, high = math.Floor(2*math.Log10(least))/2, math.Ceil(2*math.Log10(most))/2
	return low, max(high, low+1)
}

func line(series []sample, low, high float64, of func(quantiles) time.Duration) string {
	var b strings.Builder
	step := chartWidth / float64(len(series)-1)
	for i, s := range series {
		d := of(s.RunTime)
		if d <= 0 {
			continue
		}
		y := chartHeight * (1 - (math.Log10(d.Seconds())-low)/(high-low))
		if b.Len() > 0 {
			b.WriteByte(' ')
		}
		fmt.Fprintf(&b, "%.0f,%.1f", float64(i)*step, min(max(y, 0), chartHeight))
	}
	return b.String()
}

// scale gives the labels from top to bottom and the lines of the grid.
func scale(low, high float64) (marks []string, grid string) {
	var b strings.Builder
	n := int(math.Round(2 * (high - low)))
	step := 1 + (n-1)/6 // about six lines are enough
	for i := 0; i <= n; i += step {
		v := math.Pow(10, math.Floor(high-float64(i)/2))
		if (int(math.Round(2*high))-i)%2 != 0 {
			v *= 3
		}
		marks = append(marks, took(time.Duration(math.Round(v*1e9))))
		fmt.Fprintf(&b, "M0 %.1fH960", chartHeight*float64(i)/float64(n))
	}
	return marks, b.String()
}

func (c *chart) bars(series []sample) {
	for _, s := range series {
		c.Most = max(c.Most, s.Completed)
	}
	if c.Most == 0 {
		return
	}
	step := chartWidth / float64(len(series))
	for i, s := range series {
		if s.Completed == 0 {
			continue
		}
		all := barsHeight * float64(s.Completed) / float64(c.Most)
		fail := barsHeight * float64(min(s.Failed, s.Completed)) / float64(c.Most)
		if s.Failed > 0 {
			fail = max(fail, 1.5)
		}
		c.Bars = append(c.Bars, bar{
			X: fixed(float64(i) * step), W: fixed(max(step*0.8, 1)),
			Y: fixed(barsHeight - all), H: fixed(max(all-fail, 0)), HasOK: all > fail,
			FailY: fixed(barsHeight - max(fail, 0)), FailH: fixed(fail), HasFail: fail > 0,
		})
	}
}

func fixed(v float64) string { return strconv.FormatFloat(v, 'f', 1, 64) }

func hours(series []sample) []string {
	first, last := series[0].At.UTC(), series[len(series)-1].At.UTC()
	layout := "15:04"
	if last.Sub(first) < 10*time.Minute {
		layout = "15:04:05"
	}
	const marks = 4
	out := make([]string, 0, marks+1)
	for i := range marks + 1 {
		out = append(out, first.Add(last.Sub(first)*time.Duration(i)/marks).Format(layout))
	}
	return out
}

// pick takes about n samples, the last one among them.
func pick(series []sample, n int) []sample {
	step := max(1, (len(series)+n-1)/n)
	var out []sample
	for i := len(series) - 1; i >= 0; i -= step {
		out = append(out, series[i])
	}
	slices.Reverse(out)
	return out
}

func label(series []sample, c *chart) string {
	var completed, failed int64
	for _, s := range series {
		completed += s.Completed
		failed += s.Failed
	}
	text := plural(completed, "task") + " completed from " + series[0].At.UTC().Format("15:04") + " to " + series[len(series)-1].At.UTC().Format("15:04") + " UTC, " + count(failed) + " of them not succeeded."
	if c.Latest.P50 > 0 {
		text += " Run time now: half within " + took(c.Latest.P50) + ", 95 of 100 within " + took(c.Latest.P95) + ", 99 within " + took(c.Latest.P99) + "."
	}
	return text
}
