package headgate_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// allowed is the import table of docs/architecture.md: for each package of
// ours the packages of ours that its shipped code may import. A new edge is a
// design decision: change the table and the document together. Folders below
// a listed one (executors of the agent, for example) follow the same row and
// may import each other. Test files and internal/testkit are free.
var allowed = map[string][]string{
	"internal/fault":      {},
	"listener":            {},
	"listener/admission":  {},
	"migrations":          {},
	"internal/agentpb":    {},
	"openapi":             {},
	"internal/localpg":    {},
	"internal/kinds":      {"internal/fault"},
	"internal/pki":        {"internal/fault"},
	"internal/auth":       {"internal/fault"},
	"tasks":               {"internal/kinds", "internal/fault"},
	"internal/fleet":      {"tasks", "internal/kinds", "internal/pki", "internal/agentpb", "listener/admission", "internal/fault"},
	"internal/store":      {"tasks", "internal/fleet", "internal/auth", "internal/kinds", "migrations", "internal/fault"},
	"handlers":            {"tasks", "internal/fleet", "internal/auth", "internal/kinds", "listener", "internal/fault"},
	"web":                 {"tasks", "internal/fleet", "internal/auth", "internal/kinds", "listener", "internal/fault"},
	"internal/agent":      {"internal/kinds", "internal/pki", "internal/agentpb", "internal/fault"},
	"internal/controller": {"tasks", "internal/fleet", "internal/store", "internal/auth", "internal/kinds", "internal/pki", "internal/agentpb", "internal/fault", "handlers", "web", "listener", "migrations", "openapi"},
	"cmd/headgate":        {"internal/controller", "internal/localpg", "internal/fault"},
	"cmd/headgate-agent":  {"internal/agent", "internal/fault"},
}

// foreign names third-party modules that only certain packages may use, so
// that SQL, gRPC and the router each stay in their place.
var foreign = map[string][]string{
	"github.com/jmoiron/sqlx":  {"internal/store"},
	"github.com/lib/pq":        {"internal/store", "internal/localpg"},
	"github.com/pressly/goose": {"migrations"},
	"google.golang.org/grpc":   {"internal/fleet", "internal/agent", "internal/agentpb"},
	"github.com/go-chi/chi":    {"handlers", "web"},
	"github.com/spf13/cobra":   {"cmd/headgate", "cmd/headgate-agent"},
}

// testSupport are folders whose packages only tests import.
var testSupport = []string{"internal/testkit", "tasks/tasktest", "internal/fleet/fleettest", "internal/auth/authtest"}

type source struct {
	dir  string // slash path of the package's folder
	name string
	file *ast.File
	test bool
}

// sources parses every Go file of the module, imports and declarations only
// where that is enough.
func sources(t *testing.T) []source {
	t.Helper()
	var all []source
	fset := token.NewFileSet()
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if skip := d.Name(); path != "." && (strings.HasPrefix(skip, ".") || skip == "testdata" || skip == "node_modules" || skip == "bench" || skip == "tools" || skip == "bin") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		f, err := parser.ParseFile(fset, path, nil, parser.ParseComments)
		if err != nil {
			return err
		}
		all = append(all, source{filepath.ToSlash(filepath.Dir(path)), path, f, strings.HasSuffix(path, "_test.go")})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// row gives the table row of a folder: its own, or that of the nearest folder
// above it.
func row(dir string) (string, bool) {
	for d := dir; d != "."; d = filepath.ToSlash(filepath.Dir(d)) {
		if _, ok := allowed[d]; ok {
			return d, true
		}
	}
	return "", false
}

func under(dir, parent string) bool { return dir == parent || strings.HasPrefix(dir, parent+"/") }

func isTestSupport(dir string) bool {
	return slices.ContainsFunc(testSupport, func(s string) bool { return under(dir, s) })
}

func TestImportsPointToTheDomain(t *testing.T) {
	t.Parallel()
	for _, s := range sources(t) {
		if s.test || isTestSupport(s.dir) || s.dir == "." {
			continue
		}
		if under(s.dir, "openapi/gen") {
			continue // a program of the build, not of the product
		}
		from, ok := row(s.dir)
		if !ok {
			t.Errorf("%s: folder %s is not in the import table", s.name, s.dir)
			continue
		}
		for _, imp := range s.file.Imports {
			path, _ := strconv.Unquote(imp.Path.Value)
			checkForeign(t, s, from, path)
			ours, ok := strings.CutPrefix(path, "headgate/")
			if !ok || under(ours, from) {
				continue
			}
			if isTestSupport(ours) {
				t.Errorf("%s imports test support %s", s.name, ours)
				continue
			}
			to, _ := row(ours)
			if !slices.Contains(allowed[from], to) {
				t.Errorf("%s: %s may not import %s", s.name, from, ours)
			}
		}
	}
}

func checkForeign(t *testing.T, s source, from, path string) {
	t.Helper()
	for module, users := range foreign {
		if under(path, module) || strings.HasPrefix(path, module+"/") {
			if !slices.Contains(users, from) {
				t.Errorf("%s: only %v may import %s", s.name, users, module)
			}
		}
	}
}

func TestEveryPackageHasOneComment(t *testing.T) {
	t.Parallel()
	docs := map[string]int{}
	for _, s := range sources(t) {
		if s.test || s.file.Name.Name == "headgate" {
			continue
		}
		n := 0
		if s.file.Doc != nil && !strings.HasPrefix(s.file.Doc.Text(), "Code generated") && isPackageComment(s.file) {
			n = 1
		}
		docs[s.dir] += n
	}
	for dir, n := range docs {
		if n != 1 {
			t.Errorf("package %s has %d package comments, want 1", dir, n)
		}
	}
}

// isPackageComment tells a package comment from a generated file's header.
func isPackageComment(f *ast.File) bool {
	text := f.Doc.Text()
	return strings.HasPrefix(text, "Package ") || strings.HasPrefix(text, "Command ")
}

// TestNoHiddenStarts forbids init functions: what a program does begins in main.
func TestNoHiddenStarts(t *testing.T) {
	t.Parallel()
	for _, s := range sources(t) {
		if strings.HasSuffix(s.name, ".pb.go") {
			continue
		}
		for _, d := range s.file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && f.Name.Name == "init" {
				t.Errorf("%s has an init function", s.name)
			}
		}
	}
}

// TestNoSleepInTests forbids waiting by time: wait for a signal or use
// simulated time.
func TestNoSleepInTests(t *testing.T) {
	t.Parallel()
	for _, s := range sources(t) {
		if !s.test && !isTestSupport(s.dir) {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			sel, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			pkg, ok := sel.X.(*ast.Ident)
			if ok && pkg.Name == "time" && sel.Sel.Name == "Sleep" && !usesSynctest(s.file) {
				t.Errorf("%s sleeps", s.name)
			}
			return true
		})
	}
}

// usesSynctest says whether a file runs in simulated time, where a sleep is
// an exact step and not a guess.
func usesSynctest(f *ast.File) bool {
	return slices.ContainsFunc(f.Imports, func(i *ast.ImportSpec) bool { return i.Path.Value == `"testing/synctest"` })
}

// TestFilesStaySmall keeps every shipped file readable in one sitting.
func TestFilesStaySmall(t *testing.T) {
	t.Parallel()
	const maxLines = 700
	for _, s := range sources(t) {
		if s.test || strings.HasSuffix(s.name, ".pb.go") || isTestSupport(s.dir) {
			continue
		}
		if n := strings.Count(readFile(t, s.name), "\n"); n > maxLines {
			t.Errorf("%s has %d lines, at most %d", s.name, n, maxLines)
		}
	}
}

func readFile(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestTLSIsConfiguredInOnePlace forbids tls.Config literals outside pki, where
// every one of them is reviewed; the client commands have the only other one.
func TestTLSIsConfiguredInOnePlace(t *testing.T) {
	t.Parallel()
	for _, s := range sources(t) {
		if s.test || isTestSupport(s.dir) || under(s.dir, "internal/pki") || s.name == "cmd/headgate/client.go" {
			continue
		}
		ast.Inspect(s.file, func(n ast.Node) bool {
			lit, ok := n.(*ast.CompositeLit)
			if !ok {
				return true
			}
			sel, ok := lit.Type.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			if pkg, ok := sel.X.(*ast.Ident); ok && pkg.Name == "tls" && sel.Sel.Name == "Config" {
				t.Errorf("%s makes a tls.Config; add a builder to internal/pki", s.name)
			}
			return true
		})
	}
}
