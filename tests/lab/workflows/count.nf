// Counts a digit in two ranges of numbers, in two jobs, and collects the counts.
params.seconds = 0

process tally {
    clusterOptions '--vhpc-image=debian-minimal --mem=900'

    input: val first
    output: path 'count.txt'

    script:
    """
    sleep $params.seconds
    echo \$(seq $first \$(($first + 999)) | grep -o 1 | wc -l) \$(uname -r) \$VHPC_JOB_IMAGE \$SLURM_JOB_ID > count.txt
    """
}

workflow {
    channel.of(0, 1000) | tally | collectFile(name: 'total.txt', storeDir: '.', sort: true)
}
