//go:build !faultpoints

package fault

// PointsOn says whether this program has fault points; one that is shipped has
// none.
const PointsOn = false

// Point is a place at which a process can be made to die or to wait, in a
// program that was built with the tag faultpoints for that. Here it is nothing,
// and costs nothing.
func Point(string) {}
