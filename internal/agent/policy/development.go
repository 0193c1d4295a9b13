package policy

import (
	"os"
	"os/exec"
	"path/filepath"

	"gopkg.in/yaml.v3"

	"headgate/internal/fault"
)

// AppendName is the name of the program of the development policy that leaves
// a trace of each run, for checks that nothing runs twice.
const AppendName = "append-id"

// Development gives the policy that the one-command start uses: all kinds and
// a few harmless programs, as far as this machine has them. agentProgram is the
// path of headgate-agent, whose hidden command append-id writes to appendFile.
func Development(agentProgram, appendFile string) ([]byte, error) {
	type entry struct {
		Path        string   `yaml:"path"`
		Description string   `yaml:"description"`
		Args        []string `yaml:"args,omitempty"`
		Timeout     string   `yaml:"timeout"`
	}
	programs := map[string]entry{
		AppendName: {
			Path: agentProgram, Description: "Append the task's id and a newline to " + appendFile + ".",
			Args: []string{AppendName, escape(appendFile)}, Timeout: "10s",
		},
	}
	for _, p := range []struct{ name, description, arg string }{
		{"uname", "Name and release of the system.", "-a"},
		{"df", "Free space of the file systems.", "-h"},
		{"uptime", "How long the machine has been up, and its load.", ""},
	} {
		path, ok := find(p.name)
		if !ok {
			continue
		}
		e := entry{Path: path, Description: p.description, Timeout: "10s"}
		if p.arg != "" {
			e.Args = []string{p.arg}
		}
		programs[p.name] = e
	}
	data, err := yaml.Marshal(map[string]any{"version": 1, "programs": programs})
	if err != nil {
		return nil, fault.Wrap(err, fault.Internal, "policy_not_made", "The development policy cannot be written.")
	}
	_, err = Parse(data)
	return data, err
}

// escape doubles braces, which mean parameters in a template.
func escape(s string) string {
	var out []byte
	for i := range len(s) {
		if s[i] == '{' || s[i] == '}' {
			out = append(out, s[i])
		}
		out = append(out, s[i])
	}
	return string(out)
}

// find gives the real path of a system program, whatever links lead to it.
func find(name string) (string, bool) {
	path, err := exec.LookPath(name)
	if err != nil {
		return "", false
	}
	if path, err = filepath.EvalSymlinks(path); err != nil || !filepath.IsAbs(path) {
		return "", false
	}
	// A program that is one of many in one file (busybox) goes by its name.
	if filepath.Base(path) != name {
		return "", false
	}
	_, err = os.Stat(path)
	return path, err == nil
}
