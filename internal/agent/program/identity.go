package program

import (
	"os"
	"os/user"
	"strconv"
	"syscall"
)

// Identity is the account under which a program runs.
type Identity struct {
	Name string // for USER and LOGNAME
	Home string

	credential *syscall.Credential // nil = our own
}

// Lookup finds an account. An empty user is our own; group replaces the user's
// own group and groups the further ones, when they are given. Only root can
// start a program as somebody else.
func Lookup(name, group string, groups []string) (Identity, error) {
	u, err := account(name)
	if err != nil {
		return Identity{}, err
	}
	id := Identity{Name: u.Username, Home: u.HomeDir}
	if name == "" && group == "" && len(groups) == 0 {
		return id, nil
	}
	numbers := []string{u.Uid, u.Gid}
	if group != "" {
		g, err := user.LookupGroup(group)
		if err != nil {
			return id, err
		}
		numbers[1] = g.Gid
	}
	if len(groups) == 0 {
		more, err := u.GroupIds()
		if err != nil {
			return id, err
		}
		numbers = append(numbers, more...)
	}
	for _, extra := range groups {
		g, err := user.LookupGroup(extra)
		if err != nil {
			return id, err
		}
		numbers = append(numbers, g.Gid)
	}
	id.credential, err = credential(numbers)
	return id, err
}

// account gives the account of that name, or our own. Where our own has no
// entry, as in some containers, its number is its name and / its home.
func account(name string) (*user.User, error) {
	if name != "" {
		return user.Lookup(name)
	}
	u, err := user.LookupId(strconv.Itoa(os.Geteuid()))
	if err != nil {
		uid := strconv.Itoa(os.Geteuid())
		return &user.User{Uid: uid, Gid: strconv.Itoa(os.Getegid()), Username: uid, HomeDir: "/"}, nil
	}
	return u, nil
}

// credential takes the numbers of the user, its group and all further groups.
func credential(numbers []string) (*syscall.Credential, error) {
	var ids []uint32
	for _, text := range numbers {
		n, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			return nil, err
		}
		ids = append(ids, uint32(n))
	}
	return &syscall.Credential{Uid: ids[0], Gid: ids[1], Groups: ids[2:]}, nil
}
