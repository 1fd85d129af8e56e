# Sourced by the scripts here: where python and torchrun come from. Without CONTAINER from .venv, or what the site has.
# CONTAINER=NAME.sif runs checks and ranks inside that image by apptainer; any other image by Slurm's plugin pyxis.
# CONTAINER_MOUNTS names folders to mount besides the repository's (/data:/data,/scratch:/scratch).
#
# Sets container_options (for srun) and inside (words in front of a command); in_container runs a command on this node.

container_options=() inside=()
mounts=$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}
case ${CONTAINER:-} in
"")
    [ -f .venv/bin/activate ] && source .venv/bin/activate  # or what your site has: module load, conda activate
    command -v torchrun > /dev/null || refuse "torchrun is not in PATH; load what has it where $BASH_SOURCE activates .venv"
    ;;
*.sif)
    [ -f "$CONTAINER" ] || refuse "CONTAINER: there is no file $CONTAINER; apptainer build $CONTAINER docker://IMAGE"
    command -v apptainer > /dev/null || refuse "CONTAINER: $CONTAINER needs apptainer; load its module before sbatch"
    inside=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$CONTAINER")
    ;;
*)
    srun --help | grep -q -e --container-image \
        || refuse "CONTAINER: $CONTAINER needs pyxis, which this Slurm lacks; build a NAME.sif, for apptainer"
    container_options=(--container-image="$CONTAINER" --container-mounts="$mounts" --container-workdir="$PWD")
    ;;
esac

in_container() {
    if [ ${#container_options[@]} -gt 0 ]; then
        srun --nodes=1 --ntasks=1 "${container_options[@]}" "$@"
    else
        "${inside[@]}" "$@"
    fi
}
