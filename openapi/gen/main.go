// Command gen writes the OpenAPI document of the REST interface: it runs swag
// over the annotations of the handlers, repairs what swag cannot say, and
// stores the result as openapi/openapi.json and openapi/openapi.yaml. With
// -check it writes nothing and fails when the stored files are not current.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

func main() {
	check := flag.Bool("check", false, "compare with the stored files and write nothing")
	root := flag.String("root", ".", "folder of the module")
	flag.Parse()
	if err := run(*root, *check); err != nil {
		fmt.Fprintln(os.Stderr, "openapi:", err)
		os.Exit(1)
	}
}

// packages are the folders whose types appear in the document; the first one
// holds the annotations.
func packages() []string {
	return []string{"./handlers", "./tasks", "./internal/fleet", "./internal/auth", "./listener"}
}

func run(root string, check bool) error {
	raw, err := runSwag(root)
	if err != nil {
		return err
	}
	facts, err := readTypes(root, packages())
	if err != nil {
		return err
	}
	var doc map[string]any
	if err := json.Unmarshal(raw, &doc); err != nil {
		return fmt.Errorf("read swag's output: %w", err)
	}
	if err := normalise(doc, facts); err != nil {
		return err
	}
	return store(filepath.Join(root, "openapi"), doc, check)
}

// runSwag runs the swag tool of go.mod and gives the JSON that it wrote.
func runSwag(root string) ([]byte, error) {
	out, err := os.MkdirTemp("", "headgate-openapi-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(out) }()
	cmd := exec.CommandContext(context.Background(), "go", "tool", "swag", "init", "--quiet", "--v3.1", "--outputTypes", "json",
		"--overridesFile", "openapi/gen/types.swaggo", "--dir", strings.Join(packages(), ","), "--generalInfo", "doc.go", "--output", out)
	cmd.Dir = root
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("run swag: %w\n%s", err, said.String())
	}
	raw, err := os.ReadFile(filepath.Join(out, "swagger.json"))
	if err != nil { // swag ends with 0 after some errors
		return nil, fmt.Errorf("swag wrote nothing: %w\n%s", err, said.String())
	}
	return raw, nil
}

// store writes the two files, or compares with them.
func store(dir string, doc map[string]any, check bool) error {
	var text bytes.Buffer
	enc := json.NewEncoder(&text) // sorts the names
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(doc); err != nil {
		return err
	}
	asYAML, err := yaml.JSONToYAML(text.Bytes())
	if err != nil {
		return err
	}
	var old error
	for name, content := range map[string][]byte{"openapi.json": text.Bytes(), "openapi.yaml": asYAML} {
		path := filepath.Join(dir, name)
		have, err := os.ReadFile(path)
		switch {
		case err == nil && bytes.Equal(have, content):
		case check:
			old = errors.Join(old, fmt.Errorf("%s is not current; run: go run ./openapi/gen", path))
		default:
			if err := os.WriteFile(path, content, 0o644); err != nil {
				return err
			}
		}
	}
	return old
}
