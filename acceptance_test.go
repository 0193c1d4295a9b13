package headgate_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// acceptanceList is a list of what must hold, each line with a number that
// tests name in their comments.
type acceptanceList struct {
	file    string
	row     *regexp.Regexp // a line of the list: its number, and what must hold
	comment *regexp.Regexp // how tests name numbers
	number  *regexp.Regexp
}

// Lines that begin so have no test, but a reason.
const cannotOccur = "cannot occur"

// A line without a test, or a number in a comment without a line, fails here.
func TestEveryLineOfTheAcceptanceListsHasATest(t *testing.T) {
	t.Parallel()
	lists := []acceptanceList{
		{
			file:    "docs/listener-acceptance.md",
			row:     regexp.MustCompile(`(?m)^\| (\d+) \| (.*)$`),
			comment: regexp.MustCompile(`Acceptance (\d+(?:(?:, | and )\d+)*)`),
			number:  regexp.MustCompile(`\d+`),
		},
		{
			file:    "docs/queue-acceptance.md",
			row:     regexp.MustCompile(`(?m)^\| ([PQR]\d+) \| (.*)$`),
			comment: regexp.MustCompile(`\bCases? ([PQR]\d+(?:(?:, | and )[PQR]\d+)*)`),
			number:  regexp.MustCompile(`[PQR]\d+`),
		},
	}
	sources := testSources(t)
	for _, l := range lists {
		t.Run(filepath.Base(l.file), func(t *testing.T) {
			t.Parallel()
			l.compare(t, sources)
		})
	}
}

func (l acceptanceList) compare(t *testing.T, sources map[string]string) {
	text, err := os.ReadFile(l.file)
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]string{}
	for _, row := range l.row.FindAllStringSubmatch(string(text), -1) {
		if _, twice := listed[row[1]]; twice {
			t.Errorf("number %s stands twice in %s", row[1], l.file)
		}
		listed[row[1]] = row[2]
	}
	if len(listed) == 0 {
		t.Fatalf("%s has no numbers", l.file)
	}
	tested := map[string][]string{}
	for path, source := range sources {
		for _, m := range l.comment.FindAllStringSubmatch(source, -1) {
			for _, n := range l.number.FindAllString(m[1], -1) {
				tested[n] = append(tested[n], path)
			}
		}
	}
	for n, what := range listed {
		if len(tested[n]) == 0 && !strings.HasPrefix(what, cannotOccur) {
			t.Errorf("no test names number %s of %s", n, l.file)
		}
	}
	for n, where := range tested {
		if _, ok := listed[n]; !ok {
			t.Errorf("%v name number %s, which %s does not have", where, n, l.file)
		}
	}
}

// testSources gives the text of all tests, by path; what bench/ tries on real
// processes and what tasktest/ asks of every store count as such.
func testSources(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if strings.HasPrefix(d.Name(), ".") && path != "." {
				return fs.SkipDir
			}
			return nil
		}
		inBench := strings.HasPrefix(path, "bench"+string(filepath.Separator)) && strings.HasSuffix(path, ".go")
		inTaskTest := filepath.Base(filepath.Dir(path)) == "tasktest"
		if path == "acceptance_test.go" || !inBench && !inTaskTest && !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		source, err := os.ReadFile(path)
		all[path] = string(source)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}
