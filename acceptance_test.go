package headgate_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The acceptance list of the listener and the tests that prove it name each
// other: a line without a test, or a number without a line, fails here.
func TestEveryLineOfTheAcceptanceListHasATest(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("docs/listener-acceptance.md")
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]bool{}
	for _, row := range regexp.MustCompile(`(?m)^\| (\d+) \|`).FindAllStringSubmatch(string(text), -1) {
		listed[row[1]] = true
	}
	if len(listed) == 0 {
		t.Fatal("the list has no numbers")
	}
	tested := map[string][]string{}
	comment := regexp.MustCompile(`Acceptance (\d+(?:(?:, | and )\d+)*)`)
	number := regexp.MustCompile(`\d+`)
	err = filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != "." {
			return fs.SkipDir
		}
		inBench := strings.HasPrefix(path, "bench"+string(filepath.Separator)) && strings.HasSuffix(path, ".go")
		if d.IsDir() || path == "acceptance_test.go" || !inBench && !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		source, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, m := range comment.FindAllStringSubmatch(string(source), -1) {
			for _, n := range number.FindAllString(m[1], -1) {
				tested[n] = append(tested[n], path)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for n := range listed {
		if len(tested[n]) == 0 {
			t.Errorf("no test names number %s of docs/listener-acceptance.md", n)
		}
	}
	for n, where := range tested {
		if !listed[n] {
			t.Errorf("%v name number %s, which docs/listener-acceptance.md does not have", where, n)
		}
	}
}
